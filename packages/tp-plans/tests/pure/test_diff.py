"""Differences between plans."""

from __future__ import annotations

from tp_plans import Change, ColwiseParallel, Plan, Replicated, plan_for

PLAN = plan_for("Qwen3ForCausalLM")
NORM = "model.layers.*.self_attn.q_norm"


def test_a_plan_does_not_differ_from_itself() -> None:
    assert not PLAN.diff(PLAN.override({}))
    assert str(PLAN.diff(PLAN)) == ""


def test_replaced_dropped_and_added_rules_are_each_one_change() -> None:
    other = PLAN.override({NORM: Replicated(), "lm_head": None, "extra": ColwiseParallel()})
    assert PLAN.diff(other).changes == (
        Change(NORM, Replicated(gradient="partial"), Replicated()),
        Change("lm_head", PLAN["lm_head"], None),
        Change("extra", None, ColwiseParallel()),
    )


def test_the_text_shows_both_sides_of_a_change() -> None:
    assert str(Plan({"a": Replicated()}).diff(Plan({"a": Replicated(gradient="partial")}))).splitlines() == [
        "- a: Replicated(gradient='full')",
        "+ a: Replicated(gradient='partial')",
    ]
