"""Starting the ranks of the job, and seeing how and when each ends."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from faults.job import Settings, train
from harness.processes import preloaded_context


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit status (``None`` if it had to be killed), when, and what it wrote to stderr."""

    status: int | None
    at: float
    stderr: str


def launch(
    settings: Settings, *, patience: float = 300.0, after: Path | None = None, bound: float = 0.0
) -> list[Ended]:
    """Run the job to its end.

    The ranks are forked from a process that has imported everything, and no launcher above them ends the others when
    one fails: that they must do by themselves.

    Args:
        settings: of the job.
        patience: seconds until the ranks that are left are killed.
        after: once this file is there, they are killed ``bound`` seconds later.
        bound: see ``after``.
    """
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    context = preloaded_context()
    port = _free_port()
    processes: list[BaseProcess] = [
        context.Process(target=_rank, args=(settings, r, port)) for r in range(settings.ranks)
    ]
    for process in processes:
        process.start()
    ended: dict[int, Ended] = {}
    begin = time.time()
    while len(ended) < settings.ranks:
        time.sleep(0.05)
        now = time.time()
        late = now - begin > patience or (after is not None and after.exists() and now - after.stat().st_mtime > bound)
        for rank, process in enumerate(processes):
            if rank not in ended and (late or process.exitcode is not None):
                status = process.exitcode
                process.kill()  # reaches a stopped process too
                process.join()
                ended[rank] = Ended(status, now, _stderr(folder, rank).read_text(errors="replace"))
    return [ended[rank] for rank in range(settings.ranks)]


def _rank(settings: Settings, rank: int, port: int) -> None:
    with _stderr(Path(settings.folder), rank).open("wb") as stderr:
        os.dup2(stderr.fileno(), sys.stderr.fileno())
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(settings.ranks), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1", **meeting
    )
    train(settings)


def _stderr(folder: Path, rank: int) -> Path:
    return folder / f"stderr-{rank}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
