"""Versions and commit of a test run, for its report and the compatibility table."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


def environment(config: pytest.Config) -> dict[str, str]:
    """Return the versions without their local part, the commit, and whether all tests or a subset were selected."""
    everything = config.args == config.getini("testpaths") and not config.option.keyword and not config.option.markexpr
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "trl": _version("trl"),
        "tests": "all" if everything else "subset",
        "commit": _commit(config.rootpath),
    }


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "none"


def _commit(root: Path) -> str:
    """Return the short name of the commit, or an empty string outside a clone."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return done.stdout.strip()
