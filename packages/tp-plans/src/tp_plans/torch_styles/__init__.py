"""Plans as ``torch.distributed.tensor.parallel`` styles."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tp_plans.errors import PlanError, type_name
from tp_plans.model_tree import ModelTree
from tp_plans.styles import DispatchExperts, Style
from tp_plans.torch_styles.build import style_to_torch
from tp_plans.torch_styles.dispatch.exchange import (
    AllToAllExchange,
    DispatchedTokens,
    TokenExchange,
    exchange_class,
)
from tp_plans.torch_styles.dispatch.style import DispatchExpertsImpl
from tp_plans.torch_styles.parent_rules import group_by_parent

if TYPE_CHECKING:
    from tp_plans.plan import Plan

__all__ = [
    "AllToAllExchange",
    "DispatchedTokens",
    "TokenExchange",
    "exchange_class",
    "expert_styles_by_path",
    "styles_by_path",
    "to_torch",
]


def to_torch(plan: Mapping[str, Style]) -> dict[str, ParallelStyle]:
    """A plan as the dict that ``torch.distributed.tensor.parallel.parallelize_module`` takes.

    Equal rules share one style, and so the classes and compiled graphs of the modules that they match.
    """
    made: dict[Hashable, ParallelStyle] = {}
    styles: dict[str, ParallelStyle] = {}
    for pattern, (style, owned) in group_by_parent(plan).items():
        key = (style, owned.key())
        if key not in made:
            made[key] = style_to_torch(style, owned)
        styles[pattern] = made[key]
    return styles


def styles_by_path(plan: Plan, model: Any) -> dict[str, ParallelStyle]:
    """The same for one model, by the paths of its modules in place of patterns.

    torch warns of every layer that lacks what a pattern names, as layers of another kind do; and rules for one
    module at different patterns are distinguished from rules for different modules.
    """
    tree = ModelTree.of(model)
    places = (*tree.modules, *tree.parameters)
    return to_torch({path: plan[matched[0]] for path in places if (matched := plan.match(path))})


def expert_styles_by_path(
    plan: Plan, model: Any, *, shared_mesh: DeviceMesh | None, exchange: str | type[TokenExchange]
) -> dict[str, ParallelStyle]:
    """The rules of the axis ``ep`` for one model, by the paths of its modules."""
    if shared_mesh is not None and not isinstance(shared_mesh, DeviceMesh):
        raise PlanError(f"shared_mesh is of type {type_name(shared_mesh)}: give the axis as mesh['tp'], or None")
    chosen = exchange_class(exchange)
    made: dict[Style, ParallelStyle] = {}
    styles: dict[str, ParallelStyle] = {}
    for path in ModelTree.of(model).modules:
        for pattern in plan.match(path)[:1]:
            style = plan[pattern]
            if isinstance(style, DispatchExperts):
                if style not in made:
                    made[style] = DispatchExpertsImpl(style, shared_mesh=shared_mesh, exchange=chosen)
                styles[path] = made[style]
    return styles
