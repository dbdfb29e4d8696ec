"""Whether a plan fits a model, found out before anything is changed; every finding is reported at once.

Nothing here needs torch: a model is read through ``named_modules``, its parameters' shapes and its attributes,
so one on the meta device serves, and so does anything that answers alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tp_plans._validate import is_integer
from tp_plans.checks.divisibility import check_kv_sharing, divisibility_constraints
from tp_plans.checks.findings import Finding, deduplicate_by_rule
from tp_plans.checks.gradients import check_partial_gradients
from tp_plans.checks.interfaces import check_interfaces
from tp_plans.checks.parse import parse_plan
from tp_plans.checks.patterns import check_matches, check_parent_patterns, check_single_match
from tp_plans.checks.replicated import check_replicated
from tp_plans.checks.report import CheckReport
from tp_plans.checks.style_fit import check_style_fit
from tp_plans.checks.tied_weights import check_tied_weights
from tp_plans.model_tree import ModelTree
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree

__all__ = ["CheckReport", "Finding", "check"]


def check(plan: Plan | Mapping[str, object], model: Any, *, tp: int) -> CheckReport:
    """Check a plan against a model without touching either.

    Args:
        plan: the plan, or a dict of pattern to style or style word.
        model: a ``torch.nn.Module`` on any device (meta is enough), or anything with its ``named_modules``.
        tp: the size of the tensor-parallel axis.

    Returns:
        The report.  Errors: words that name no style, patterns that match nothing, modules matched twice, modules
        that a style does not suit, numbers that the model does not have, sizes that do not divide (with those that
        would), layers that read otherwise than their neighbours hand on, parameters whose gradient would be a part,
        tied weights that would be untied.  Warnings: what of this is likely only, and large parameters left whole.
        What is wrong with many modules of one rule alike is one finding.

    Raises:
        PlanError: ``plan`` is neither a plan nor a dict.
        ModelError: ``model`` is no model.

    Example:
        >>> import torch, tp_plans
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
        >>> plan = tp_plans.Plan({"0": tp_plans.ColwiseParallel(), "1": tp_plans.RowwiseParallel()})
        >>> tp_plans.check(plan, model, tp=2).errors
        ()
    """
    plan, unread = (plan, []) if isinstance(plan, Plan) else parse_plan(plan)
    tree = ModelTree.of(model)
    if not is_integer(tp, least=1):
        return CheckReport(
            plan, tp, (*unread, Finding("error", "", f"tp is {tp!r}", "give the axis's size, 1 or more"))
        )
    planned = PlannedTree(tree, plan)
    cuts, missing = divisibility_constraints(planned)
    findings = [
        *unread,
        *check_matches(planned),
        *check_single_match(planned),
        *check_parent_patterns(planned),
        *check_style_fit(planned),
        *missing,
        *check_kv_sharing(planned, tp),
        *(cut.finding(tp) for cut in cuts if not cut.fits(tp)),
        *check_interfaces(planned),
        *check_partial_gradients(planned),
        *check_tied_weights(planned),
        *(check_replicated(planned) if tp > 1 else ()),
    ]
    return CheckReport(plan, tp, tuple(deduplicate_by_rule(findings, planned.rules)), tuple(cuts))
