"""The two programs of the example as its page starts them: the engine computes what the trainer does."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

from harness.interpreter import environment

FOLDER = Path(__file__).parents[1] / "docs" / "examples" / "two_processes"


def free_ports() -> int:
    """A port that is free, and so is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def start(script: str, node: int, ranks: int, port: int) -> subprocess.Popen[str]:
    launcher = ("torchrun", "--nnodes=2", f"--node-rank={node}")
    place = (f"--nproc-per-node={ranks}", "--master-addr=localhost", f"--master-port={port}")
    return subprocess.Popen(
        [*launcher, *place, script],
        cwd=FOLDER,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_engine_has_the_trainers_weights_after_every_step() -> None:
    port = free_ports()
    programs = [start("trainer.py", 0, 2, port), start("engine.py", 1, 1, port)]
    try:
        said = [program.communicate(timeout=240) for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 0], said
    rows = re.findall(r"step (\d): loss ([\d.]+), the engine's logits differ by ([\d.e+-]+)", said[0][0])
    assert [row[0] for row in rows] == ["0", "1", "2"]
    losses = [float(row[1]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert all(float(row[2]) < 1e-5 for row in rows)
