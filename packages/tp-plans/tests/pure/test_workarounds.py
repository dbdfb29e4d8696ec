"""Workarounds for versions of torch: each is needed by a supported version, and sits where the table says."""

import ast
import re
from importlib.metadata import requires
from pathlib import Path

import pytest

import tp_plans
from tp_plans._torch_compat import WORKAROUNDS

PACKAGE = Path(tp_plans.__file__).parent


def oldest_supported():
    (requirement,) = (each for each in requires("tp-plans") if each.startswith(("torch<", "torch>")))
    return tuple(map(int, re.search(r">=(\d+)\.(\d+)", requirement).groups()))


@pytest.mark.parametrize("workaround", WORKAROUNDS, ids=lambda each: each.place)
def test_a_supported_version_of_torch_still_needs_it(workaround):
    needed = workaround.last >= oldest_supported()
    assert needed, f"remove {workaround.place}: torch {workaround.last} was the last to need it"


@pytest.mark.parametrize("workaround", WORKAROUNDS, ids=lambda each: each.place)
def test_it_sits_where_the_table_says_and_names_its_source(workaround):
    module, _, name = workaround.place.partition(".")
    tree = ast.parse((PACKAGE / "torch_styles" / f"{module}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert workaround.upstream.startswith(("https://github.com/pytorch/pytorch/", "no upstream issue found"))


def test_every_comment_on_a_version_of_torch_is_in_the_table():
    files = {place.place.partition(".")[0] for place in WORKAROUNDS}
    versioned = {
        file.stem for file in (PACKAGE / "torch_styles").glob("*.py") if re.search(r"torch 2\.\d+", file.read_text())
    }
    assert versioned <= files
