"""Derive the expert-parallel form of a plan: stacked experts on the axis ``ep``, everything else as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tp_plans._transformers_compat import own_expert_plan
from tp_plans.class_names import EXPERTS_WITH_IDENTITIES
from tp_plans.errors import CapabilityError, UnknownStyleError
from tp_plans.infer.bytecode import first_argument, takes_argument
from tp_plans.model_tree import ModelTree, is_at_or_below
from tp_plans.plan import Plan
from tp_plans.planned_tree import merge_per_block
from tp_plans.styles import DispatchExperts, Style

#: The words of transformers' ``base_model_ep_plan`` (5.20 to 5.23) for modules whose tokens are dispatched.
_DISPATCHED = ("ep_dispatch_experts", "megamoe_experts")
#: Words for parameters and layers of such modules, which ``DispatchExperts`` covers, and for dense layers, which
#: transformers shards over ``ep`` where ``ep`` is ``tp``: here they keep the rules of the axis ``tp``.
_COVERED = ("grouped_gemm", "replicated_with_grad_allreduce", "colwise", "rowwise", "ep_router", "gather")


def with_expert_parallelism(plan: Plan | None, model: Any) -> Plan:
    """Return a plan whose stacked experts are dispatched over the axis ``ep``.

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
        UnknownStyleError: transformers' plan uses a word that has no translation.

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
    experts = {path: _style(path, tree) for path in expert_stacks(tree)}
    if not experts:
        raise CapabilityError(
            f"{name} has no module with stacked experts, parameters [experts, ...]: leave ep at 1, or write rules "
            "with DispatchExperts"
        )
    rules = dict(_without(base, tuple(experts), tree))
    return Plan(
        rules | merge_per_block(experts.items(), tree), name=base.name, sequence_parallel=base.sequence_parallel
    )


def expert_stacks(tree: ModelTree) -> tuple[str, ...]:
    """Return the modules that hold stacked experts and can be dispatched: by structure, and by transformers' plan.

    Raises:
        UnknownStyleError: transformers' plan uses a word that has no translation.
    """
    shipped = set(_shipped(tree))
    return tuple(
        path
        for path, module in tree.modules.items()
        if path in shipped
        or type(module).__name__ in EXPERTS_WITH_IDENTITIES
        or (tree.is_expert_stack(path) and _takes_routes(module))
    )


def _takes_routes(module: Any) -> bool:
    """Return whether a forward takes routes, or tokens alone."""
    return takes_argument(module, "top_k_index") or first_argument(module) == "hidden_states"


def _style(path: str, tree: ModelTree) -> DispatchExperts:
    return DispatchExperts(identity_indices=type(tree.modules[path]).__name__ in EXPERTS_WITH_IDENTITIES)


def _shipped(tree: ModelTree) -> Iterator[str]:
    """Yield the modules that the plans of transformers dispatch, those of inner models included."""
    for path, module in tree.modules.items():
        if not (words := own_expert_plan(module)):
            continue
        patterns = {f"{path}.{pattern}" if path else pattern: word for pattern, word in words.items()}
        matched, _ = tree.match(patterns)
        for pattern, word in patterns.items():
            if word in _DISPATCHED:
                yield from (place for place in matched.get(pattern, ()) if tree.is_expert_stack(place))
            elif word not in _COVERED:
                known = ", ".join((*_DISPATCHED, *_COVERED))
                raise UnknownStyleError(f"unknown word {word!r} for {pattern!r} in the expert plan: known are {known}")


def _without(plan: Plan, experts: tuple[str, ...], tree: ModelTree) -> Iterator[tuple[str, Style]]:
    """Yield the rules of a plan except those that match experts or what is inside them; others' matches are kept."""
    inside = {
        place for place in (*tree.modules, *tree.parameters) if any(is_at_or_below(place, path) for path in experts)
    }
    places: dict[str, list[str]] = {}
    for place in (*tree.modules, *tree.parameters):
        for pattern in plan.match(place):
            places.setdefault(pattern, []).append(place)
    for pattern, style in plan.items():
        kept = [place for place in places.get(pattern, ()) if place not in inside]
        if len(kept) == len(places.get(pattern, ())):
            yield pattern, style
        else:
            yield from ((place, style) for place in kept)
