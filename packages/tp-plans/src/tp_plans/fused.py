"""The matrices in fused weights, by the plan of a model."""

from __future__ import annotations

from typing import Any

from tp_plans.errors import TpPlansError
from tp_plans.hugging_face.translate import from_hugging_face
from tp_plans.infer.suggest import suggest
from tp_plans.model_tree import ModelTree
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree
from tp_plans.registry import architecture_plan


def fused_rows(model: Any, plan: Plan | None = None) -> dict[str, tuple[int, ...]]:
    """Return the rows of each matrix in every fused weight of a model, by the path of the module."""
    tree = ModelTree.of(model)
    planned = PlannedTree(tree, _any_plan(tree) if plan is None else plan)
    rows = {path: planned.fused_rows(path) for path, _ in planned.styled_modules()}
    return {path: parts for path, parts in rows.items() if parts}


def _any_plan(tree: ModelTree) -> Plan:
    """Return the first plan that a source knows; nothing is run."""
    for source in (architecture_plan, from_hugging_face):
        try:
            return source(tree)
        except TpPlansError:
            continue
    try:
        return suggest(tree).plan
    except TpPlansError:
        return Plan({}, name="no plan")
