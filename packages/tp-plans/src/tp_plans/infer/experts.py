"""Derive the expert-parallel form of a plan: stacked experts on the axis ``ep``, everything else as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tp_plans._transformers_compat import own_expert_plan
from tp_plans.errors import CapabilityError
from tp_plans.infer.bytecode import first_argument, takes_argument
from tp_plans.model_tree import ModelTree, ancestors, join
from tp_plans.naming import EXPERTS_WITH_IDENTITIES
from tp_plans.plan import Plan
from tp_plans.planned_tree import merge_per_block
from tp_plans.styles import DispatchExperts, Style


def with_expert_parallelism(plan: Plan | None, model: Any) -> Plan:
    """Return a plan that dispatches stacked experts over the axis ``ep``.

    Rules of the axis ``tp`` for the experts, and for anything inside them, are left out; routers, shared experts and
    all other layers keep theirs.  Experts are found by structure, and where transformers ships a plan for them
    (``base_model_ep_plan``).

    Args:
        plan: the plan of the axis ``tp``; ``None`` for none, so that all other layers are replicated over it.  Rules of
            the axis ``ep`` that it has are kept, and no others are added.
        model: a ``torch.nn.Module`` on any device (meta is enough).

    Returns:
        The plan of both axes.

    Raises:
        CapabilityError: the model has no stacked experts.

    Example:
        >>> import torch, tp_plans
        >>> class Experts(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 16, 8))
        ...         self.down_proj = torch.nn.Parameter(torch.zeros(4, 8, 8))
        ...     def forward(self, hidden_states, top_k_index, top_k_weights): ...
        >>> tp_plans.with_expert_parallelism(None, torch.nn.ModuleDict({"experts": Experts()}))["experts"]
        DispatchExperts(identity_indices=False)
    """
    tree = ModelTree.of(model)
    name = type(tree.model).__name__
    base = Plan({}, name=f"{name}'s experts") if plan is None else plan
    if base.on_axis("ep"):
        return base
    experts = {
        path: DispatchExperts(identity_indices=type(tree.modules[path]).__name__ in EXPERTS_WITH_IDENTITIES)
        for path in expert_stacks(tree)
    }
    if not experts:
        raise CapabilityError(
            f"{name} has no module with stacked experts, parameters [experts, ...]: leave ep at 1, or write rules "
            "with DispatchExperts"
        )
    rules = dict(_without(base, tuple(experts), tree)) | merge_per_block(experts.items(), tree)
    return Plan(rules, name=base.name, sequence_parallel=base.sequence_parallel)


def expert_stacks(tree: ModelTree) -> tuple[str, ...]:
    """Return the modules that hold stacked experts and can be dispatched: by structure, and by transformers' plan."""
    known = {path for path, module in tree.modules.items() if type(module).__name__ in EXPERTS_WITH_IDENTITIES}
    known.update(_shipped(tree))

    def takes_routes(module: Any) -> bool:  # or tokens alone
        return takes_argument(module, "top_k_index") or first_argument(module) == "hidden_states"

    stacks = (path for path in tree.modules if path in known or tree.is_expert_stack(path))
    return tuple(path for path in stacks if path in known or takes_routes(tree.modules[path]))


def _shipped(tree: ModelTree) -> Iterator[str]:
    """Yield the stacked experts in the plans of transformers, inner models included."""
    # The words differ from release to release (``moe_tp_experts`` up to 5.19, ``ep_dispatch_experts`` from 5.20 on),
    # and what they say of other layers holds where ``ep`` is ``tp``: here those keep the rules of the axis ``tp``.
    for path, module in tree.modules.items():
        if patterns := own_expert_plan(module):
            matched, _ = tree.match(join(path, pattern) for pattern in patterns)
            yield from (place for places in matched.values() for place in places if tree.is_expert_stack(place))


def _without(plan: Plan, experts: tuple[str, ...], tree: ModelTree) -> Iterator[tuple[str, Style]]:
    """Yield the rules of a plan without matches of experts or of modules inside experts."""
    stacks = set(experts)
    inside = {place for place in (*tree.modules, *tree.parameters) if not stacks.isdisjoint((place, *ancestors(place)))}
    places: dict[str, list[str]] = {}
    for place in (*tree.modules, *tree.parameters):
        for pattern in plan.match(place):
            places.setdefault(pattern, []).append(place)
    for pattern, style in plan.items():
        outside = [place for place in places.get(pattern, ()) if place not in inside]
        if len(outside) == len(places.get(pattern, ())):
            yield pattern, style
        else:
            yield from ((place, style) for place in outside)
