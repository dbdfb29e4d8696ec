"""Processes that start with torch, transformers and the packages already imported.

A fork server imports ``harness.preload`` once. Each process that it forks starts in about 0.1 s, where an
interpreter of its own needs several seconds of CPU time for the same imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext


def preloaded_context() -> ForkServerContext:
    """Return a multiprocessing context whose processes are forked from the server, which the first call starts."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["harness.preload"])
    # Python 3.11 gives the server neither this process's sys.path nor an error if the import fails.
    with _environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


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
