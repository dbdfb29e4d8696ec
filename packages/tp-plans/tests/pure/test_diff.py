"""Differences between plans."""

from __future__ import annotations

from tp_plans import ColwiseParallel, NoParallel, Plan, RuleChange, plan_for

PLAN = plan_for("Qwen3ForCausalLM")
NORM = "model.layers.*.self_attn.q_norm"


def test_a_plan_does_not_differ_from_itself() -> None:
    assert not PLAN.diff(PLAN.override({}))
    assert str(PLAN.diff(PLAN)) == ""


def test_replaced_dropped_and_added_rules_are_each_one_change() -> None:
    other = PLAN.override({NORM: NoParallel(), "lm_head": None, "extra": ColwiseParallel()})
    assert PLAN.diff(other).changes == (
        RuleChange(NORM, NoParallel(gradient="partial"), NoParallel()),
        RuleChange("lm_head", PLAN["lm_head"], None),
        RuleChange("extra", None, ColwiseParallel()),
    )


def test_the_text_shows_both_sides_of_a_change() -> None:
    assert str(Plan({"a": NoParallel()}).diff(Plan({"a": NoParallel(gradient="partial")}))).splitlines() == [
        "- a: NoParallel(gradient='full')",
        "+ a: NoParallel(gradient='partial')",
    ]
