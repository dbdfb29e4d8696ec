"""Compilation of tests before the test processes of ``pytest -n`` start.

Each of those processes would rewrite the asserts of all tests, and each rank compile the modules of its functions,
where no earlier run has left them.
"""

from __future__ import annotations

import compileall
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def rewrite_tests(config: pytest.Config) -> None:
    """Leave the tests that the command names as pytest rewrites them, and compiled, where processes look for them."""
    if sys.dont_write_bytecode:
        return
    rewrite = _rewriter(config)
    for path in _files(config):
        rewrite(path)
        compileall.compile_file(path, quiet=2)


def _rewriter(config: pytest.Config) -> Callable[[Path], None]:
    """Return what rewrites a file; nothing with a pytest that has other names for its parts, none of which is public.

    What is public runs the modules too, which is left to the test processes.
    """
    try:
        from _pytest.assertion import assertstate_key
        from _pytest.assertion.rewrite import (
            PYC_TAIL,
            _read_pyc,
            _rewrite_test,
            _write_pyc,
            get_cache_dir,
            try_makedirs,
        )
    except ImportError:
        return lambda path: None
    state = config.stash.get(assertstate_key, None)

    def rewrite(path: Path) -> None:
        folder = get_cache_dir(path)
        rewritten = folder / f"{path.stem}{PYC_TAIL}"
        if state is not None and _read_pyc(path, rewritten) is None and try_makedirs(folder):
            key, code = _rewrite_test(path, config)
            _write_pyc(state, code, key, rewritten)

    return rewrite


def _files(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = (config.invocation_params.dir / argument.partition("::")[0]).resolve()
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else [path] if path.suffix == ".py" else []
