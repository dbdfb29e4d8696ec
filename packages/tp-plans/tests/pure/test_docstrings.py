"""Docstrings of public functions: complete, and with examples that run."""

import doctest
import inspect
import re

import pytest

import tp_plans
from tp_plans.boxes import mesh_boxes
from tp_plans.model_tree import ModelTree

FUNCTIONS = [name for name in tp_plans.__all__ if inspect.isfunction(getattr(tp_plans, name))]


def examples(value):
    found = doctest.DocTestFinder(recurse=False).find(value, globs={})
    return [test for test in found if test.examples]


def needs_torch(test):
    return any(re.match("(import|from) torch", example.source) for example in test.examples)


def failures(test):
    return doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_states_arguments_result_and_an_example(name):
    function = getattr(tp_plans, name)
    parts = [part for part in ("Args:", "Returns:", "Example:") if part not in function.__doc__]
    allowed = {"register": {"Returns:"}, "architectures": {"Args:"}}  # nothing to state
    assert set(parts) <= allowed.get(name, set())
    assert examples(function)


@pytest.mark.parametrize("value", [*(getattr(tp_plans, name) for name in FUNCTIONS), ModelTree, mesh_boxes])
def test_the_example_runs_without_torch(value):
    for test in examples(value):
        if not needs_torch(test):
            assert failures(test) == 0
