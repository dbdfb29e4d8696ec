"""Each front door's table of contents names what it exports."""

import re
from importlib import import_module

import pytest

import tp_plans

DOORS = (
    *("", ".boxes", ".checks", ".errors", ".explanation", ".infer", ".layouts", ".model_tree", ".models", ".naming"),
    *(".nemo", ".runtime", ".styles", ".transfer", ".verification"),
)
#: Front doors whose docstring lists all names; the others' contents are one function or a list of classes.
WITH_CONTENTS = ("", ".boxes", ".infer", ".models", ".runtime", ".transfer")


@pytest.mark.parametrize("door", WITH_CONTENTS)
def test_table_of_contents_names_all_that_is_public_and_nothing_else(door):
    module = import_module(f"tp_plans{door}")
    contents = module.__doc__.split("\n\n")[1]
    assert set(re.findall(r"``(\w+)``", contents)) == set(module.__all__)


def test_top_level_has_at_most_28_names_and_runtime_at_most_25():
    assert len(tp_plans.__all__) <= 28
    assert len(tp_plans.runtime.__all__) <= 25


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        *(("resolve_plan", r"plan_for\(model, plan\)"), ("from_hugging_face", r"plan_for\(model, 'transformers'\)")),
        *(("suggest", r"plan_for\(model, 'inferred'\), or tp_plans\.infer\.suggest"), ("Doubt", r"tp_plans\.infer")),
        *(
            ("rowwise_free", "rowwise=False"),
            ("split_towers", "towers_tp=SIZE"),
            ("ModelTree", r"tp_plans\.model_tree"),
        ),
        *(("styles_by_path", r"plan\.to_torch\(model\)"), ("Finding", r"tp_plans\.checks"), ("Layout", r"\.layouts")),
    ],
)
def test_old_names_raise_with_the_new_call_or_module(name, fix):
    with pytest.raises(AttributeError, match=rf"module 'tp_plans' has no attribute '{name}': use .*{fix}"):
        getattr(tp_plans, name)


@pytest.mark.parametrize(
    ("door", "name", "home"),
    [
        *(("runtime", "parent", "model_tree"), ("runtime", "QUERY", "naming"), ("runtime", "shard_ranges", "layouts")),
        *(("transfer", "Box", "boxes"), ("transfer", "mesh_boxes", "boxes")),
    ],
)
def test_names_that_left_a_door_raise_with_their_module(door, name, home):
    with pytest.raises(AttributeError, match=rf"module 'tp_plans\.{door}' has no attribute '{name}'.*tp_plans\.{home}"):
        getattr(import_module(f"tp_plans.{door}"), name)
    assert hasattr(import_module(f"tp_plans.{home}"), name)


@pytest.mark.parametrize("door", DOORS[1:])
def test_front_doors_are_attributes_of_the_package_and_named_in_its_docstring(door):
    assert getattr(tp_plans, door[1:]) is import_module(f"tp_plans{door}")
    assert f"``tp_plans{door}``" in tp_plans.__doc__


def test_runtime_refuses_unknown_names():
    with pytest.raises(AttributeError, match=r"module 'tp_plans\.runtime' has no attribute 'nothing'"):
        tp_plans.runtime.nothing  # noqa: B018
