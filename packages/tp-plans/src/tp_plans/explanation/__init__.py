"""Explain a plan on a model: every rule with its modules, their parameters' placements and its collectives."""

from __future__ import annotations

from typing import Any

from tp_plans._validate import require_size
from tp_plans.errors import CheckFailedError
from tp_plans.explanation.collectives import CollectiveSummary, collectives_of
from tp_plans.explanation.types import Explanation, RuleExplanation, ShardedParameter, sharded_parameters
from tp_plans.model_tree import ModelTree
from tp_plans.plan import Plan, require_plan
from tp_plans.planned_tree import PlannedTree
from tp_plans.styles import DispatchExperts, ParameterStyle

__all__ = ["CollectiveSummary", "Explanation", "RuleExplanation", "ShardedParameter", "explain"]


def explain(plan: Plan, model: Any, *, tp: int, ep: int = 1) -> Explanation:
    """Explain rule by rule how a plan splits a model, without changing either.

    Args:
        plan: the plan; one that ``check`` finds no errors in.
        model: a ``torch.nn.Module`` on any device (meta is enough).
        tp: the size of the tensor-parallel axis.
        ep: the size of the expert-parallel axis, over which ``DispatchExperts`` divides experts.

    Returns:
        For every rule the modules that it matches, their parameters with full and local shape, and the collectives
        of one forward and one backward pass that trains every parameter.  They are derived from the layouts: how
        layers follow one another is read off their places and widths.  Parameters without a rule come last.

    Raises:
        CheckFailedError: ``tp`` or ``ep`` is not a size.
        PlanError: ``plan`` is not a plan.
        ModelError: ``model`` is not a model.

    Example:
        >>> import torch, tp_plans
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
        >>> plan = tp_plans.Plan({"0": tp_plans.ColwiseParallel(), "1": tp_plans.RowwiseParallel()})
        >>> tp_plans.explain(plan, model, tp=2).collectives("forward")
        {'all_reduce': 1}
    """
    require_plan(plan)
    tree = ModelTree.of(model)
    require_size(tp, CheckFailedError)
    require_size(ep, CheckFailedError)
    planned = PlannedTree(tree, plan)
    rules = []
    for pattern, style in plan.items():
        candidates = planned.parameters if isinstance(style, ParameterStyle) else planned.modules
        places = tuple(path for path in candidates if planned.rules[path][:1] == [pattern])
        ranks = ep if isinstance(style, DispatchExperts) else tp
        parameters = tuple(each for path in places for each in sharded_parameters(path, planned, ranks))
        collectives = collectives_of(places, style, planned, ranks)
        rules.append(RuleExplanation(pattern, style, places, parameters, collectives))
    ruled = {parameter.path for rule in rules for parameter in rule.parameters}
    every = (each for path in planned.modules for each in sharded_parameters(path, planned, tp))
    return Explanation(plan, tp, tuple(rules), tuple(each for each in every if each.path not in ruled), ep)
