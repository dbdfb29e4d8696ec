"""A user's typed program: plans without torch."""

from typing import assert_type

import tp_plans
from tp_plans import ColwiseParallel, Plan, Replicate, Style
from tp_plans.transfer import TransferPlan, plan_transfer
from tp_plans.verification import VerificationReport


def gathered_head(name: str) -> Plan:
    plan = tp_plans.plan_for(name, sequence_parallel=True)
    assert_type(plan["lm_head"], Style)
    return plan.override({"lm_head": ColwiseParallel(output_layouts=Replicate())})


def checked(plan: Plan, model: object, tp: int) -> tuple[tp_plans.checks.Finding, ...]:
    assert_type(tp_plans.verify_plan(model, plan, tp=tp), VerificationReport)
    assert_type(tp_plans.explain(plan, model, tp=tp).collectives("forward"), dict[str, int])
    return tp_plans.check(plan, model, tp=tp).errors


def sent(trainer: tp_plans.transfer.TransferLayout, engine: tp_plans.transfer.TransferLayout) -> int:
    plan = plan_transfer(trainer, engine)
    assert_type(plan, TransferPlan)
    return plan.bytes_sent(0)
