"""Compilation of tests before the test processes of ``pytest -n`` start.

Each of those processes would rewrite the asserts of all tests, and each rank compile the modules of its functions,
where no earlier run has left them. pytest has no public way to do that without running the modules.
"""

from __future__ import annotations

import compileall
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import assertstate_key
from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc, get_cache_dir, try_makedirs


def rewrite_tests(config: pytest.Config) -> None:
    """Leave the tests that the command names as pytest rewrites them, and compiled, where processes look for them."""
    state = config.stash.get(assertstate_key, None)
    if state is None or sys.dont_write_bytecode:
        return
    for path in _files(config):
        folder = get_cache_dir(path)
        rewritten = folder / f"{path.stem}{PYC_TAIL}"
        if _read_pyc(path, rewritten) is None and try_makedirs(folder):
            key, code = _rewrite_test(path, config)
            _write_pyc(state, code, key, rewritten)
        compileall.compile_file(path, quiet=2)


def _files(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = (config.invocation_params.dir / argument.partition("::")[0]).resolve()
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else [path] if path.suffix == ".py" else []
