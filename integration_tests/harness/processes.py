"""Processes that start with torch, transformers and the packages already imported.

A fork server imports ``harness.preload`` once. Each process that it forks starts in about 0.1 s, where an
interpreter of its own needs several seconds of CPU time for the same imports. The test processes of ``pytest -n`` are
forked from it too, and share it for their ranks.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

#: The address of the server of another process that this process forks from.
_shared: list[str] = []


def preloaded_context() -> ForkServerContext:
    """Return a multiprocessing context whose processes are forked from the server, which the first call starts."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["harness.preload"])
    if _shared:
        return context
    # Python 3.11 gives the server neither this process's sys.path nor an error if the import fails.
    with (
        _environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), OMP_NUM_THREADS="1"),
        _streams_to(server_output()),
    ):
        forkserver.ensure_running()
    return context


@cache
def server_output() -> Path:
    """Return the file with the output of processes that do not redirect their streams; pytest prints it on failure."""
    file, path = tempfile.mkstemp(prefix="processes-", suffix=".log")
    os.close(file)
    atexit.register(Path(path).unlink, missing_ok=True)
    return Path(path)


@contextmanager
def _streams_to(path: Path) -> Iterator[None]:
    """Let standard output and error of processes that are started inside the ``with`` go to a file."""
    with path.open("ab") as file:
        streams = [(stream, os.dup(stream)) for stream in (1, 2)]
        for stream, _ in streams:
            os.dup2(file.fileno(), stream)
        try:
            yield
        finally:
            for stream, before in streams:
                os.dup2(before, stream)
                os.close(before)


def server_address() -> str | None:
    """Return the address of the fork server that this process started, for :func:`share_server`.

    Python has no public form of it.  ``None`` where there is no server, or it wants a key too (Python 3.14).
    """
    server = forkserver._forkserver  # type: ignore[attr-defined]
    return None if hasattr(server, "_forkserver_authkey") else server._forkserver_address


def share_server(address: str) -> None:
    """Let this process, a descendant of a fork server, fork from that server instead of starting its own."""
    _shared.append(address)
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server.ensure_running = address, lambda: None
    forkserver.ensure_running = server.ensure_running


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
