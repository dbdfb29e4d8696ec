"""Whether a plan fits a model, found out before anything is changed; every finding is reported at once.

Nothing here needs torch: a model is read through ``named_modules``, its parameters' shapes and its attributes,
so one on the meta device serves, and so does anything that answers alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tp_plans._validate import is_integer, require_model
from tp_plans.checks.divisibility import cuts_of, uncounted
from tp_plans.checks.findings import Finding, once_a_rule
from tp_plans.checks.gradients import unmarked
from tp_plans.checks.interfaces import unmet
from tp_plans.checks.parse import plan_from_words
from tp_plans.checks.patterns import matched_twice, owners_written_otherwise, unmatched
from tp_plans.checks.replicated import left_whole
from tp_plans.checks.report import CheckReport
from tp_plans.checks.style_fit import unsuited
from tp_plans.checks.tied_weights import untied
from tp_plans.checks.tree import tree_of
from tp_plans.plan import Plan

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
    """
    plan, unread = (plan, []) if isinstance(plan, Plan) else plan_from_words(plan)
    require_model(model)
    if not is_integer(tp, least=1):
        return CheckReport(
            plan, tp, (*unread, Finding("error", "", f"tp is {tp!r}", "give the axis's size, 1 or more"))
        )
    tree = tree_of(plan, model)
    cuts, missing = cuts_of(tree)
    findings = [
        *unread,
        *unmatched(tree),
        *matched_twice(tree),
        *owners_written_otherwise(tree),
        *unsuited(tree),
        *missing,
        *uncounted(tree, tp),
        *(cut.finding(tp) for cut in cuts if not cut.fits(tp)),
        *unmet(tree),
        *unmarked(tree),
        *untied(tree),
        *(left_whole(tree) if tp > 1 else ()),
    ]
    return CheckReport(plan, tp, tuple(once_a_rule(findings, tree.rules)), tuple(cuts))
