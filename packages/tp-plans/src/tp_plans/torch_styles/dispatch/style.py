"""The style that sends tokens to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_plans import layouts
from tp_plans._torch_compat import CALL, call_of, own_parameters
from tp_plans.errors import LayoutError, PlanError
from tp_plans.styles import DispatchExperts, ParameterStyle
from tp_plans.torch_styles.base import (
    Args,
    Arguments,
    ForwardContext,
    Kwargs,
    LocalTensorStyle,
    Part,
    distribute_tied,
    expert_counts,
)
from tp_plans.torch_styles.boundaries import local_parts, scaled_gradient, summed_gradient
from tp_plans.torch_styles.collectives import own_bounds
from tp_plans.torch_styles.dispatch.exchange import (
    AllToAllExchange,
    DispatchedTokens,
    TokenExchange,
    from_experts,
    to_experts,
)
from tp_plans.torch_styles.dispatch.rows import join_rows, split_rows, sum_rows
from tp_plans.torch_styles.gradients import full_view
from tp_plans.torch_styles.placement import plain_full_tensor

#: The attribute of a module for the facts about its experts.
_STACK = "_tp_plans_stack"


@dataclass(frozen=True)
class _Stack:
    """Facts about a module's experts, read once, when the style is applied."""

    experts: int  # of all ranks
    own: range  # this rank's
    stacked: frozenset[str]  # its parameters with one row for each expert, and without a separate rule
    has_inner: bool  # whether modules below it have parameters
    counts: tuple[str, ...]  # its attributes with the number of experts
    scale: float | None = None  # of the gradients of its parameters


def scale_expert_gradients(module: nn.Module, scale: float) -> None:
    """Multiply the gradients of the parameters of dispatched experts, below and its own, in every backward."""
    vars(module)[_STACK] = replace(vars(module)[_STACK], scale=None if scale == 1 else scale)


class DispatchExpertsImpl(LocalTensorStyle):
    """``DispatchExperts``: brings this rank's experts the tokens of all ranks, and every rank its tokens' sums."""

    # The module's own forward runs on pairs of a token and one expert, ``top_k = 1``, so that none of its
    # implementations meets an index that stands for no expert. The ranks of ``shared_mesh`` (``tp``) have the same
    # tokens and divide them among themselves; ``None`` if every rank has different tokens.
    style: DispatchExperts
    #: The compiler leaves the call to Python, FSDP2's hooks included: its sizes are data.
    class_attributes: ClassVar[Mapping[str, Any]] = {
        CALL: torch.compiler.disable(call_of(nn.Module))  # type: ignore[no-untyped-call]
    }

    def __init__(
        self,
        style: DispatchExperts,
        parameter_rules: Mapping[str, ParameterStyle] | None = None,
        *,
        shared_mesh: DeviceMesh | None = None,
        exchange: type[TokenExchange] = AllToAllExchange,
    ) -> None:
        super().__init__(style, parameter_rules)
        self.shared_mesh, self.exchange = shared_mesh, exchange

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        experts = number_of_experts(own_parameters(module))
        if not experts or experts % mesh.size():
            legal = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
            raise PlanError(
                f"{type(module).__name__} has {experts} stacked experts, which cannot be divided over "
                f"ep={mesh.size()}: use an ep out of {legal or 1}"
            )
        for child, name, parameter in _inner_parameters(module):
            child.register_parameter(name, distribute_tied(parameter, mesh, layouts.Replicate(), self.src_data_rank))

    def _distribute(self, module: nn.Module, mesh: DeviceMesh) -> None:
        experts = number_of_experts(own_parameters(module))
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter.shape[:1] != (experts,) and not isinstance(parameter, DTensor):
                # Rows besides the experts' (LongCat): another dim, since uneven shards of rows are sharded again.
                even = (dim for dim in range(1, parameter.ndim) if parameter.shape[dim] % mesh.size() == 0)
                layout = layouts.Shard(next(even, 0)) if parameter.ndim else layouts.Replicate()
                module.register_parameter(name, distribute_tied(parameter, mesh, layout, self.src_data_rank))
        super()._distribute(module, mesh)
        parameters = own_parameters(module).items()
        stacked = {name for name, stack in parameters if stack is not None and stack.shape[:1] == (experts,)}
        vars(module)[_STACK] = _Stack(
            experts=experts,
            own=range(*own_bounds(experts, mesh)),
            stacked=frozenset(stacked - self._matched_rules.keys()),
            has_inner=bool(_inner_parameters(module)),
            counts=expert_counts(module, experts),
        )

    def _part(self, name: str, parameter: DTensor) -> Part:
        return Part(parameter.shape, None)  # gradients are scaled, and some rows come from other ranks

    def views(self, module: nn.Module, parameters: Mapping[str, DTensor]) -> Mapping[str, Tensor]:
        stack: _Stack = vars(module)[_STACK]
        stacked = [name for name in parameters if name in stack.stacked]
        parts = local_parts([parameters[name] for name in stacked], scale=stack.scale)
        tensors = dict(zip(stacked, parts, strict=True))
        others = {name: each for name, each in parameters.items() if name not in tensors}
        ruled = {name: each for name, each in others.items() if each.shape[:1] == (stack.experts,)}
        for name, view in super().views(module, ruled).items():
            tensors[name] = scaled_gradient(view, stack.scale)
        for name, parameter in others.items():
            if name not in ruled:
                rows = full_view(parameter, partial=True)
                own = rows[stack.own.start : stack.own.stop] if rows.ndim > 1 else rows
                tensors[name] = scaled_gradient(own, stack.scale)
        return tensors

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs, context: ForwardContext) -> Arguments:
        stack: _Stack = vars(module)[_STACK]
        experts = stack.experts
        for child, name, parameter in _inner_parameters(module) if stack.has_inner else ():
            # Summed once per forward, not per call: ranks call modules inside experts as often as they have tokens.
            view = scaled_gradient(summed_gradient(parameter), stack.scale)
            context.swap_in(child, name, parameter, view)
        context.count_own_experts(module, stack.counts, stack.own)
        names = _argument_names(type(module))  # type: ignore[arg-type]  # classes are hashable
        arguments = self._arguments(module, names, args, kwargs)
        if len(arguments) == 1:
            (tokens,) = arguments.values()
            values: tuple[Tensor, ...] = (self._every_expert(tokens, experts, context),)
        else:
            values = self._routed(tuple(arguments.values()), experts, context)
        by_name = dict(zip(arguments, values, strict=True))
        # As the caller gave them: a replacement of the module's forward may have other names.
        return tuple(by_name[name] for name, _ in zip(names, args, strict=False)), {
            name: by_name[name] for name in kwargs
        }

    def post_forward(self, module: nn.Module, output: Tensor, context: ForwardContext) -> Tensor:
        saved = context.saved
        shape, dtype = saved["shape"], saved["dtype"]
        if (sizes := saved.get("sizes")) is not None:
            outputs = output.view(saved["own"], -1, shape[-1])[:, : sum(sizes)]
            local = from_experts(context.mesh, outputs, sizes)
            full = local if self.shared_mesh is None else join_rows(self.shared_mesh, local, saved["tokens"], dim=1)
            return full.reshape(shape).clone() if full.shape != shape else full
        dispatched: DispatchedTokens = saved["dispatched"]
        pairs = output[: len(dispatched.pair_row)]  # without the row that stands for none
        rows = sum_rows(pairs, dispatched.pair_row, len(dispatched.rows))
        local = saved["exchange"].combine(rows, dispatched)
        if (identity := saved.get("identity")) is not None:
            local = local + identity
        full = local if self.shared_mesh is None else join_rows(self.shared_mesh, local, saved["tokens"])
        full = full.to(dtype)
        return full if full.shape == shape else full.view(shape).clone()  # no view: models add to it in place

    def _arguments(self, module: nn.Module, names: list[str], args: Args, kwargs: Kwargs) -> dict[str, Tensor]:
        """Return the tokens, and the indices and weights if there are any, plain and full, by the argument's name."""
        arguments = dict(zip(names, args, strict=False)) | kwargs
        index = next((name for name, value in arguments.items() if not value.is_floating_point()), None)
        order = [names[0]] if index is None else [names[0], index, *(set(arguments) - {names[0], index})]
        if sorted(order) != sorted(arguments) or len(order) not in (1, 3):
            raise LayoutError(
                f"{type(module).__name__} was called with {', '.join(arguments)}: DispatchExperts knows forwards of "
                "(hidden_states, top_k_index, top_k_weights), whatever the names, and of (hidden_states)"
            )
        if self.shared_mesh is None:
            return {name: arguments[name] for name in order}
        return {name: plain_full_tensor(arguments[name], self.shared_mesh) for name in order}

    def _routed(self, routes: tuple[Tensor, ...], experts: int, context: ForwardContext) -> tuple[Tensor, ...]:
        """Send this rank's tokens, and return the pairs that came as arguments of the module's forward."""
        hidden, index, weights = routes
        context.saved.update(shape=hidden.shape, dtype=hidden.dtype, tokens=index.shape[0])
        hidden = hidden.reshape(-1, hidden.shape[-1])
        if self.shared_mesh is not None:
            hidden, index, weights = split_rows(self.shared_mesh, hidden, index, weights)
        if self.style.identity_indices:
            identity_weights = weights.masked_fill(index < experts, 0).sum(-1, keepdim=True)
            context.saved["identity"] = hidden * identity_weights
        exchange = self.exchange(context.mesh)
        dispatched = exchange.dispatch(hidden, index, weights, experts=experts)
        context.saved.update(exchange=exchange, dispatched=dispatched)
        rows, expert, weight = dispatched.rows[dispatched.pair_row], dispatched.pair_expert, dispatched.pair_weight
        if not len(expert):  # a pair of zeros keeps every parameter in the graph, with zeros for its gradient
            rows = torch.cat([rows, dispatched.rows.sum(0, keepdim=True)])
            expert, weight = expert.new_zeros(1), torch.cat([weight, weight.new_zeros(1)])
        if self.style.identity_indices:  # LongCat's forward needs two choices: the other is an identity of weight zero
            none = torch.full_like(expert, experts // context.mesh.size())
            return rows, torch.stack([expert, none], dim=1), torch.stack([weight, torch.zeros_like(weight)], dim=1)
        return rows, expert.unsqueeze(1), weight.unsqueeze(1)

    def _every_expert(self, hidden: Tensor, experts: int, context: ForwardContext) -> Tensor:
        tokens = hidden.view(experts, -1, hidden.shape[-1])
        context.saved.update(shape=hidden.shape, dtype=hidden.dtype, tokens=tokens.shape[1])
        if self.shared_mesh is not None:
            (tokens,) = split_rows(self.shared_mesh, tokens, dim=1)
        local, sizes = to_experts(self.exchange(context.mesh), tokens)
        context.saved.update(sizes=sizes, own=local.shape[0])
        if not local.shape[1]:
            local = local.new_zeros(local.shape[0], 1, local.shape[2]) + local.sum(1, keepdim=True)
        return local.reshape(-1, hidden.shape[-1])


def _inner_parameters(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the parameters below a module, without its own: their owner, name and value."""
    below = [child for child in module.modules() if child is not module]
    places = ((child, name, parameter) for child in below for name, parameter in own_parameters(child).items())
    return [place for place in places if place[2] is not None]


def number_of_experts(parameters: Mapping[str, Any]) -> int:
    """Return the number of experts stacked in a module's own parameters; 0 where none are."""
    stacks = (stack for stack in parameters.values() if stack is not None and stack.ndim == 3)
    return min((int(stack.shape[0]) for stack in stacks), default=0)


@cache
def _argument_names(kind: type[nn.Module]) -> list[str]:
    """Return the names of the arguments of a class's own forward, that before any style."""
    forwards = (vars(cls)["forward"] for cls in kind.__mro__ if "forward" in vars(cls))
    named = (list(signature(forward).parameters)[1:] for forward in forwards)
    return next(names for names in named if names[:1] != ["args"])
