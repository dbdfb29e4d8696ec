"""The matrices in fused weights, by the plan of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
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
    # Without ``plan`` all sources of plans are read: a plan leaves out the weights that its mesh cannot divide.
    tree = ModelTree.of(model)
    rows: dict[str, tuple[int, ...]] = {}
    for read in _known_plans(tree) if plan is None else (plan,):
        planned = PlannedTree(tree, read)
        rows |= {path: parts for path, _ in planned.styled_modules() if (parts := planned.fused_rows(path))}
    return rows


def _known_plans(tree: ModelTree) -> Iterator[Plan]:
    """Yield the plan of every source that knows the model, the one to prefer last; nothing is run."""
    for source in (lambda tree: suggest(tree).plan, from_hugging_face, architecture_plan):
        with suppress(TpPlansError):
            yield source(tree)
