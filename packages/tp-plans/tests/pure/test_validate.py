"""Values that are not a plan, a model or a size are refused by type, with the value to give instead."""

import pytest
from stub_modules import decoder

from tp_plans import ColwiseParallel, Plan, PlanError, TpPlansError, check, explain, plan_for
from tp_plans.errors import ModelError
from tp_plans.infer import suggest
from tp_plans.infer.without_rowwise import rowwise_free

RULES = {"up": ColwiseParallel()}
PLAN = Plan(RULES)


class NamesOnly:
    """A class and not a model of it, as ``check(plan, LlamaForCausalLM)`` would hand on."""

    def named_modules(self):
        yield "", self


@pytest.mark.parametrize("model", [None, "LlamaForCausalLM", 3, {"up": None}, NamesOnly])
@pytest.mark.parametrize(
    "asked",
    [lambda m: check(PLAN, m, tp=2), lambda m: check(RULES, m, tp=2), lambda m: explain(PLAN, m, tp=2), suggest],
    ids=["check", "check rules", "explain", "suggest"],
)
def test_functions_refuse_values_that_are_no_model_with_the_fix(asked, model):
    with pytest.raises(ModelError, match=r"is not a model: .*meta device"):
        asked(model)


@pytest.mark.parametrize("plan", [None, "auto", 3, [("up", ColwiseParallel())]])
def test_check_takes_plans_and_dicts_only(plan):
    with pytest.raises(PlanError, match=r"is not a plan: .*plan_for\(model\)"):
        check(plan, decoder(), tp=2)


@pytest.mark.parametrize("plan", [None, "auto", RULES])
@pytest.mark.parametrize(
    "asked",
    [
        lambda plan: explain(plan, decoder(), tp=2),
        rowwise_free,
    ],
    ids=["explain", "rowwise_free"],
)
def test_a_dict_is_not_taken_for_a_plan_where_only_a_plan_will_do(asked, plan):
    with pytest.raises(PlanError, match=r"is not a plan: .*plan_for\(model\)"):
        asked(plan)


@pytest.mark.parametrize("tp", [0, -2, "2", 2.0, True])
def test_functions_refuse_sizes_of_an_axis_below_1_or_of_other_types(tp):
    with pytest.raises(TpPlansError, match=rf"tp is {tp!r}: give the axis's size, 1 or more"):
        explain(PLAN, decoder(), tp=tp)
    with pytest.raises(TpPlansError, match=rf"tp is {tp!r}: give the axis's size, 1 or more"):
        plan_for(None, PLAN, towers_tp=tp)


def test_model_error_is_a_value_error():
    assert issubclass(ModelError, ValueError)
