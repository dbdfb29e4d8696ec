"""The top level and each room say in their docstring what is public, and open without what they do not need."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

import pytest

from harness.interpreter import environment

#: The rooms that users import by name.
ROOMS = ("batching", "debug", "dry_run", "memory", "mesh", "model", "monitor", "optim", "trainers")
#: Packages whose names are imported at their first use.
LAZY = ("fsdp_runtime", *(f"fsdp_runtime.{room}" for room in ("meters", "steps", "sync", "trainers")))
#: Public names of the top level.
MOST = 36


def _table(module: str) -> set[str]:
    """The names in the table of contents: the docstring's lines that begin with a label and a colon, and their rest."""
    text = import_module(module).__doc__ or ""
    rows = re.findall(r"^\w[\w, ]*: +(``.*(?:\n {2,}.*)*)", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"``(\w+)``", row)}


@pytest.mark.parametrize("module", ["fsdp_runtime", *(f"fsdp_runtime.{room}" for room in ROOMS)])
def test_the_table_of_contents_has_every_public_name(module: str) -> None:
    assert _table(module) == set(import_module(module).__all__)


def test_the_top_level_has_few_names_and_every_one_is_found() -> None:
    package = import_module("fsdp_runtime")
    assert len(package.__all__) <= MOST
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="module 'fsdp_runtime' has no attribute 'nothing'"):
        package.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'Routes': use fsdp_runtime\.steps\.Routes"):
        package.Routes  # noqa: B018


def test_an_old_name_names_the_new_one() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'FSDPOptions': use fsdp_runtime\.FSDP2"):
        import_module("fsdp_runtime").FSDPOptions  # noqa: B018


@pytest.mark.parametrize("room", ["cli", "dry_run", "mesh", "trainers"])
def test_a_room_of_the_command_line_or_of_an_extra_opens_without_torch(room: str) -> None:
    script = f"import sys, fsdp_runtime.{room}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", LAZY)
def test_no_module_has_the_name_of_a_public_function_of_its_package(name: str) -> None:
    package = import_module(name)
    assert not {each.name for each in iter_modules(package.__path__)} & set(package.__all__)


@pytest.mark.parametrize("name", LAZY)
def test_a_package_is_a_plain_module(name: str) -> None:
    """Ray sends functions that name a module with cloudpickle, which takes modules of this type only."""
    assert type(import_module(name)) is ModuleType
