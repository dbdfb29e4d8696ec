"""Each front door's table of contents names what it exports."""

import re
from importlib import import_module

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


def test_top_level_has_at_most_48_names():
    assert len(tp_plans.__all__) <= 48


@pytest.mark.parametrize("door", DOORS[1:])
def test_front_doors_are_attributes_of_the_package_and_named_in_its_docstring(door):
    assert getattr(tp_plans, door[1:]) is import_module(f"tp_plans{door}")
    assert f"``tp_plans{door}``" in tp_plans.__doc__


def test_runtime_refuses_unknown_names():
    with pytest.raises(AttributeError, match=r"module 'tp_plans\.runtime' has no attribute 'nothing'"):
        tp_plans.runtime.nothing  # noqa: B018
