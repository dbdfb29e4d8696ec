"""Persistent worker processes that form one gloo world.

The processes are forked from one that has imported torch and transformers, are started once, and every test
sends them a function.  A failure on any rank reaches the test as one exception that holds the error of each
rank; a world that may be out of step afterwards (a rank died, or hangs) is replaced by a new one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

from harness.processes import preloaded_context

#: After one rank has failed, how long the others may take to finish before they count as stranded.
GRACE_SECONDS = 10.0
#: Collectives inside a rank give up after this long, so that a stranded rank reports instead of hanging.
COLLECTIVE_TIMEOUT = timedelta(seconds=150)


@dataclass(frozen=True)
class RankError:
    """What one rank raised: the exception's type name, its message and the traceback as text."""

    type_name: str
    message: str
    traceback: str


class RanksFailed(RuntimeError):
    """At least one rank raised, died or did not answer; ``errors`` maps those ranks to what they said."""

    def __init__(self, errors: dict[int, RankError]) -> None:
        self.errors = errors
        lines = [f"rank {rank}: {error.type_name}: {error.message}" for rank, error in sorted(errors.items())]
        first = errors[min(errors)]
        super().__init__("\n".join([*lines, f"--- rank {min(errors)} ---", first.traceback]))


def _output_of(store: str) -> str:
    """Return the file of the ranks' standard output and error."""
    return os.path.join(os.path.dirname(store), "output")


def _serve(rank: int, world_size: int, store: str, connection: Connection) -> None:
    # The fork server started before pytest captures output, so that a rank would write to the terminal.
    with open(_output_of(store), "ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ.update(
        OMP_NUM_THREADS="1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), USE_LIBUV="0"
    )
    import torch
    import torch.distributed as dist

    from harness.gloo_groups import share_device, share_groups

    torch.set_num_threads(1)
    share_groups()
    share_device()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    while (task := connection.recv()) is not None:
        function, args, kwargs = task
        try:
            result = function(*args, **kwargs)
            sys.stdout.flush()  # before the answer: the output belongs to its test
            connection.send((True, result))
        except BaseException as error:  # everything a rank raises must reach the test
            report = RankError(type(error).__name__, str(error), traceback.format_exc())
            connection.send((False, report))
    dist.destroy_process_group()


class RankPool:
    """``world_size`` processes that run one function at a time, each as a rank of a gloo world."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._output: BinaryIO | None = None  # what the ranks print, read up to the last run

    def run(self, function: Callable[..., Any], /, *args: Any, timeout: float = 300.0, **kwargs: Any) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on every rank and return the results in rank order.

        ``function`` must be importable from a module and everything passed or returned picklable.

        Raises:
            RanksFailed: a rank raised, died, or did not answer within ``timeout`` seconds (or within
                ``GRACE_SECONDS`` of another rank's failure).
        """
        self._start()
        for connection in self._connections:
            connection.send((function, args, kwargs))
        results, errors = self._collect(timeout)
        if self._output is not None:
            sys.stderr.write(self._output.read().decode(errors="replace"))  # pytest shows it if the test fails
        if errors:
            if len(errors) < self.world_size or any(e.type_name in ("Died", "Stranded") for e in errors.values()):
                self.close(force=True)  # collectives may be out of step: begin again with a fresh world
            raise RanksFailed(errors)
        return [results[rank] for rank in range(self.world_size)]

    def close(self, *, force: bool = False) -> None:
        """End the processes; ``force`` does not wait for them to finish what they are doing."""
        for connection in self._connections:
            if not force:
                with contextlib.suppress(OSError):
                    connection.send(None)
        for process in self._processes:
            if not force:
                process.join(timeout=GRACE_SECONDS)
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._output is not None:
            self._output.close()
            self._output = None

    def _start(self) -> None:
        if self._processes:
            return
        context = preloaded_context()
        store = os.path.join(tempfile.mkdtemp(prefix="ranks-"), "store")
        Path(_output_of(store)).touch()
        self._output = open(_output_of(store), "rb")  # noqa: SIM115  # for as long as the ranks live
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, timeout: float) -> tuple[dict[int, Any], dict[int, RankError]]:
        results: dict[int, Any] = {}
        errors: dict[int, RankError] = {}
        deadline = time.monotonic() + timeout
        pending = dict(enumerate(self._connections))
        while pending:
            ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in pending:
                    errors[rank] = RankError("Stranded", f"no answer within {timeout:g} s", "")
                break
            for rank in [rank for rank, connection in pending.items() if connection in ready]:
                try:
                    succeeded, value = pending.pop(rank).recv()
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE_SECONDS)
                    code = self._processes[rank].exitcode
                    message = f"the process ended without an answer (exit code {code})"
                    succeeded, value = False, RankError("Died", message, "")
                if succeeded:
                    results[rank] = value
                else:
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return results, errors
