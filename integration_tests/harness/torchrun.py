"""Starting a script under torchrun, as a user does."""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness.interpreter import environment


def torchrun(
    script: str | Path, *arguments: str, ranks: int, cwd: Path, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on ``ranks`` processes of this machine, with this process's import path, and wait for it.

    The launcher and the ranks are forked with their imports done; nothing else differs (see harness.interpreter).
    """
    done = subprocess.run(
        ["torchrun", "--standalone", f"--nproc-per-node={ranks}", script, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    done.stdout = own_lines(done.stdout)
    return done


def own_lines(printed: str) -> str:
    """Lines of a program itself: gloo of some releases prints every connection on standard output."""
    lines = printed.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo]") and "connected peer ranks" not in line)
