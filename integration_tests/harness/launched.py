"""Scripts started as under torchrun, but in forked processes whose imports are done."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

from harness.processes import preloaded_context
from harness.torchrun import own_lines


def launch(
    script: str | Path, *arguments: str, ranks: int, cwd: Path, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` as the main program of ``ranks`` processes with torchrun's variables, and wait for them.

    A script of four ranks starts in less than a second, where torchrun needs five interpreters. As under torchrun,
    the first rank that fails ends the others; unlike there, nothing is restarted and no summary is printed.
    """
    with tempfile.TemporaryDirectory(prefix="launch-") as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port, folder = probe.getsockname()[1], Path(name)
        probe.close()
        context = preloaded_context()
        processes = [
            context.Process(target=_rank, args=(rank, ranks, port, folder, str(script), arguments, cwd))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        running = {process.sentinel: process for process in processes}
        while running:
            ended = wait(list(running), timeout=timeout)
            codes = [running.pop(sentinel).exitcode for sentinel in map(int, ended)]
            if any(codes) or not ended:
                break
        for process in running.values():
            process.kill()
        for process in processes:
            process.join()
        status = max((abs(process.exitcode or 0) for process in processes), default=0)
        printed, errors = (
            "".join((folder / f"{kind}-{r}").read_text() for r in range(ranks)) for kind in ("out", "err")
        )
    return subprocess.CompletedProcess([str(script), *arguments], status, own_lines(printed), errors)


def _rank(rank: int, ranks: int, port: int, folder: Path, script: str, arguments: tuple[str, ...], cwd: Path) -> None:
    for kind, stream in (("out", sys.stdout), ("err", sys.stderr)):
        with (folder / f"{kind}-{rank}").open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(cwd)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), **meeting
    )
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
