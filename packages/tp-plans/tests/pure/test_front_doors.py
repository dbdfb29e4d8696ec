"""Each front door's table of contents names what it exports."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import tp_plans

DOORS = ("", ".errors", ".explanation", ".models", ".nemo", ".runtime", ".styles", ".transfer", ".verification")
#: Front doors whose docstring lists all names; the others' contents are one function or a list of classes.
WITH_CONTENTS = ("", ".models", ".runtime", ".transfer")


@pytest.mark.parametrize("door", WITH_CONTENTS)
def test_table_of_contents_names_all_that_is_public_and_nothing_else(door):
    module = import_module(f"tp_plans{door}")
    contents = module.__doc__.split("\n\n")[1]
    assert set(re.findall(r"``(\w+)``", contents)) == set(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_top_level_has_at_most_48_names():
    assert len(tp_plans.__all__) <= 48


@pytest.mark.parametrize("door", DOORS[1:])
def test_front_doors_are_attributes_of_the_package_and_named_in_its_docstring(door):
    assert getattr(tp_plans, door[1:]) is import_module(f"tp_plans{door}")
    assert f"``tp_plans{door}``" in tp_plans.__doc__


def test_runtime_refuses_unknown_names():
    with pytest.raises(AttributeError, match=r"module 'tp_plans\.runtime' has no attribute 'nothing'"):
        tp_plans.runtime.nothing  # noqa: B018


@pytest.mark.parametrize("package", ["fsdp-runtime/src/fsdp_runtime", "rl-logprobs/src/rl_logprobs"])
def test_other_packages_import_documented_names_only(package):
    doors = {f"tp_plans{door}": set(getattr(import_module(f"tp_plans{door}"), "__all__", ())) for door in DOORS}
    files = sorted((Path(__file__).parents[3] / package).rglob("*.py"))
    assert files
    undocumented = [
        f"{Path(file).name}: {node.module}.{alias.name}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tp_plans"
        for alias in node.names
        if alias.name not in doors.get(node.module, ())
    ]
    assert undocumented == []
