import logging
import sys
import types
from typing import ClassVar

import pytest

from tp_plans import (
    ColwiseParallel,
    Plan,
    PlanError,
    Replicate,
    RowwiseParallel,
    UnknownArchitectureError,
    plan_for,
)
from tp_plans.errors import CustomPlanError, UnknownStyleError
from tp_plans.infer.without_rowwise import rowwise_free

RULES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class LlamaForCausalLM:
    """Known by its name."""


class Shipping:
    """Unknown to the registry, with a plan of transformers."""

    _tp_plan: ClassVar = {"up": "colwise"}

    def named_modules(self):
        yield "", self
        yield "up", object()


class Unknown(Shipping):
    """Known to nobody."""

    _tp_plan = None


@pytest.fixture
def module(monkeypatch):
    """A module ``user_plans`` to put plans into."""
    made = types.ModuleType("user_plans")
    monkeypatch.setitem(sys.modules, "user_plans", made)
    return made


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_auto_is_the_plan_of_the_architecture(sequence_parallel):
    plan = plan_for(LlamaForCausalLM(), sequence_parallel=sequence_parallel)
    assert plan == plan_for("llama", sequence_parallel=sequence_parallel)


def test_auto_falls_back_to_what_transformers_ships_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, logger="tp_plans"):
        plan = plan_for(Shipping())
    assert plan == Plan({"up": ColwiseParallel()})
    assert "Shipping: using the plan that transformers ships" in caplog.text


def test_sequence_parallelism_is_never_dropped_in_silence():
    with pytest.raises(UnknownArchitectureError, match="sequence parallelism cannot be derived"):
        plan_for(Shipping(), sequence_parallel=True)
    with pytest.raises(CustomPlanError, match=r"not a sequence-parallel one: .*sequence_parallel=True"):
        plan_for(Unknown(), RULES, sequence_parallel=True)


def test_auto_for_an_unknown_model_tells_both_failures():
    with pytest.raises(UnknownArchitectureError, match=r"no plan is known for Unknown.*Unknown ships no"):
        plan_for(Unknown())


@pytest.mark.parametrize("source", ["auto", "own", "LlamaForCausalLM"])
def test_plan_for_finds_a_known_model_by_each_word_for_its_own_plan(source):
    assert plan_for(LlamaForCausalLM(), source) == plan_for("llama")


def test_plan_for_own_takes_no_shipped_plan():
    with pytest.raises(UnknownArchitectureError, match="no plan is known for Shipping"):
        plan_for(Shipping(), "own")
    assert plan_for(Shipping(), "transformers") == Plan({"up": ColwiseParallel()})


@pytest.mark.parametrize("source", ["llama", Plan(RULES), RULES])
def test_plan_for_without_row_wise_layers_takes_any_source(source):
    assert plan_for(None, source, rowwise=False) == rowwise_free(plan_for(None, source))


def test_a_plan_stays_as_it_is():
    plan = plan_for("llama", sequence_parallel=True)
    assert plan_for(Unknown(), plan) is plan
    assert plan_for(Unknown(), plan, sequence_parallel=True) is plan


def test_a_dict_of_styles_or_words_is_a_plan():
    plan = plan_for(Unknown(), {"up": "colwise", "down": "rowwise_split_input", "x": ColwiseParallel(multiple_of=4)})
    assert dict(plan) == {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(input_layouts=Replicate()),
        "x": ColwiseParallel(multiple_of=4),
    }


@pytest.mark.parametrize(
    "value",
    [RULES, Plan(RULES), lambda: RULES, lambda: Plan(RULES), {"up": "colwise", "down": "rowwise"}],
    ids=["dict", "plan", "function to dict", "function to plan", "words"],
)
def test_a_dotted_path_leads_to_a_plan(module, value):
    module.plan = value
    assert plan_for(Unknown(), "user_plans.plan") == Plan(RULES)


def test_a_plan_from_a_dotted_path_is_called_by_it(module):
    module.plan = RULES
    assert plan_for(Unknown(), "user_plans.plan").name == "user_plans.plan"


def test_a_module_is_imported_from_disk(tmp_path, monkeypatch):
    (tmp_path / "plans_on_disk.py").write_text(
        "from tp_plans import ColwiseParallel\ndef plan():\n    return {'up': ColwiseParallel()}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert plan_for(Unknown(), "plans_on_disk.plan") == Plan({"up": ColwiseParallel()})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("Auto", "'Auto' is none of 'auto', .* no dotted path"),
        ("", "'' is none of 'auto', .* no dotted path"),
        ("no_such_module.plan", "module 'no_such_module' cannot be imported: .*No module named"),
        (".plan", "'.plan' is none of 'auto', .* no dotted path"),
        (".user_plans.plan", "'.user_plans.plan' is none of 'auto', .* no dotted path"),
        ("user_plans.", "'user_plans.' is none of 'auto', .* no dotted path"),
        ("user_plans..plan", "'user_plans..plan' is none of 'auto', .* no dotted path"),
        ("user_plans.missing", "module 'user_plans' has no 'missing'"),
        (None, "is of type NoneType, not a Plan, a dict"),
        (3, "is of type int, not a Plan, a dict"),
        ([("up", "colwise")], "is of type list, not a Plan, a dict"),
        ({}, "is an empty dict: it would split nothing"),
        ({"up": 3}, "the rule for 'up' is of type int, "),
        ({"up": None}, "the rule for 'up' is of type NoneType, "),
        ({"up": ColwiseParallel}, r"the rule for 'up' is of type type, .*write one, as ColwiseParallel\(\)"),
        ({"up down": ColwiseParallel()}, "'up down' is not a module path"),
        ({3: ColwiseParallel()}, "3 is not a module path"),
        ({3: "colwise"}, "3 is not a module path"),
    ],
)
def test_a_bad_plan_is_refused_with_what_is_wrong(module, plan, message):
    with pytest.raises(CustomPlanError, match=message):
        plan_for(Unknown(), plan)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"user_plans\.plan is of type int, not a Plan"),
        ({}, r"user_plans\.plan is an empty dict"),
        ({"up": 3}, r"user_plans\.plan: the rule for 'up' is of type int"),
        (lambda: None, r"user_plans\.plan is of type NoneType, not a Plan"),
        (lambda: "other.plan", r"user_plans\.plan is of type str, not a Plan"),
        (lambda model: RULES, "calling it without arguments raised TypeError"),
        (lambda: 1 / 0, "calling it without arguments raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_bad_value_behind_a_path_is_refused_by_that_path(module, value, message):
    module.plan = value
    with pytest.raises(CustomPlanError, match=message):
        plan_for(Unknown(), "user_plans.plan")


@pytest.mark.parametrize("body", ["def plan(:", "raise RuntimeError('no device')", "import no_such_dependency"])
def test_a_module_that_fails_on_import_is_told_with_its_error(tmp_path, monkeypatch, body):
    (tmp_path / "broken_plans.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CustomPlanError, match=r"module 'broken_plans' cannot be imported: \w+: ") as caught:
        plan_for(Unknown(), "broken_plans.plan")
    assert caught.value.__cause__ is not None


def test_an_unknown_word_keeps_its_own_type_and_names_pattern_and_known_words():
    with pytest.raises(UnknownStyleError, match=r"'colwize' for 'up': known are all_reduce, colwise"):
        plan_for(Unknown(), {"up": "colwize"})


def test_a_style_of_another_library_is_told_by_its_full_name():
    foreign = type("ColwiseParallel", (), {"__module__": "torch.distributed.tensor.parallel.style"})()
    with pytest.raises(CustomPlanError, match=r"torch\.distributed\.tensor\.parallel\.style\.ColwiseParallel"):
        plan_for(Unknown(), {"up": foreign})


def test_every_refusal_of_a_plan_is_one_kind_of_error():
    assert issubclass(CustomPlanError, PlanError)
    assert issubclass(UnknownStyleError, PlanError)
    assert issubclass(PlanError, ValueError)
