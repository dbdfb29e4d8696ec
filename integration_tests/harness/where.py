"""What a run of the tests ran on, for its report and the compatibility table."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


def where(config: pytest.Config) -> dict[str, str]:
    """Versions without their local part, the commit, and whether all tests were asked for or some."""
    everything = config.args == config.getini("testpaths") and not config.option.keyword and not config.option.markexpr
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "tests": "all" if everything else "subset",
        "commit": _commit(config.rootpath),
    }


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "none"


def _commit(root: Path) -> str:
    """The short name of the commit; empty outside a clone."""
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return told.stdout.strip()
