"""Examples of docstrings that need torch run."""

import doctest
import inspect

import pytest

import tp_plans
from tp_plans import nemo

FUNCTIONS = [
    *(getattr(tp_plans, name) for name in tp_plans.__all__),
    tp_plans.runtime.dispatch_styles,
    *(getattr(tp_plans.transfer, name) for name in ("engine_layout", "engine_rules", "mesh_layout")),
    *(
        tp_plans.boxes.mesh_boxes,
        tp_plans.infer.suggest,
        tp_plans.transfer.plan_cover,
        tp_plans.transfer.plan_transfer,
        tp_plans.models.decoder_plan,
    ),
]
FUNCTIONS = [value for value in FUNCTIONS if inspect.isfunction(value)]


@pytest.mark.parametrize(
    "function", [*FUNCTIONS, nemo.get_hf_tp_plan, nemo.translate_parallel_style], ids=lambda each: each.__name__
)
def test_the_example_runs(function):
    tests = [test for test in doctest.DocTestFinder(recurse=False).find(function, globs={}) if test.examples]
    assert tests
    assert [doctest.DocTestRunner().run(test).failed for test in tests] == [0] * len(tests)


def test_every_name_for_runtimes_is_found():
    assert all(getattr(tp_plans.runtime, name) is not None for name in tp_plans.runtime.__all__)
