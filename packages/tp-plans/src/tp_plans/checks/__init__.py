"""Check a plan against a model before anything is changed; all findings are reported at once.

Torch is not imported: a model, or any object with ``named_modules``, is read through shapes and attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tp_plans._validate import is_integer
from tp_plans.checks.divisibility import check_kv_sharing, divisibility_constraints
from tp_plans.checks.findings import Finding, deduplicate_by_rule
from tp_plans.checks.gradients import check_partial_gradients
from tp_plans.checks.interfaces import check_interfaces
from tp_plans.checks.patterns import check_matches, check_parent_patterns, check_single_match, parse_plan
from tp_plans.checks.replicated import check_replicated
from tp_plans.checks.report import CheckReport
from tp_plans.checks.style_fit import check_dispatched, check_style_fit, check_tied_weights
from tp_plans.model_tree import ModelTree
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree

__all__ = ["CheckReport", "Finding", "check"]


def check(plan: Plan | Mapping[str, object], model: Any, *, tp: int, ep: int = 1) -> CheckReport:
    """Check a plan against a model without touching either.

    Args:
        plan: the plan, or a dict of pattern to style or style word.
        model: a ``torch.nn.Module`` on any device (meta is enough), or anything with its ``named_modules``.
        tp: the size of the tensor-parallel axis.
        ep: the size of the expert-parallel axis, for rules with ``DispatchExperts``.

    Returns:
        The report.  Errors: unknown style names, patterns that match nothing, modules matched twice, modules that a
        style does not fit, numbers that the model does not have, sizes that do not divide (with those that do),
        input layouts that differ from a neighbour's output layout, parameters with a partial sum as gradient,
        replicated modules after blocks that output sharded activations, tied weights that would be untied.
        Warnings: likely cases of these, and large parameters that stay replicated.  Equal findings of one rule are
        merged.

    Raises:
        PlanError: ``plan`` is neither a plan nor a dict.
        ModelError: ``model`` is not a model.

    Example:
        >>> import torch, tp_plans
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
        >>> plan = tp_plans.Plan({"0": tp_plans.ColwiseParallel(), "1": tp_plans.RowwiseParallel()})
        >>> tp_plans.check(plan, model, tp=2).errors
        ()
    """
    plan, unread = (plan, []) if isinstance(plan, Plan) else parse_plan(plan)
    tree = ModelTree.of(model)
    for name, size in (("tp", tp), ("ep", ep)):
        if not is_integer(size, least=1):
            wrong = Finding("error", "", f"{name} is {size!r}", "give the axis's size, 1 or more")
            return CheckReport(plan, tp, (*unread, wrong))
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
        *check_dispatched(planned, ep),
        *(cut.finding(tp) for cut in cuts if not cut.fits(tp)),
        *check_interfaces(planned),
        *check_partial_gradients(planned),
        *check_tied_weights(planned),
        *(check_replicated(planned) if tp > 1 else ()),
    ]
    return CheckReport(plan, tp, tuple(deduplicate_by_rule(findings, planned.rules)), tuple(cuts))
