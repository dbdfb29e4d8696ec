"""Styles for sharded experts, and for modules with partial outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tp_plans import layouts
from tp_plans._torch_compat import own_parameters
from tp_plans._transformers_compat import mark_expert_parallel, skips_sentinel_index
from tp_plans.errors import LayoutError, PlanError
from tp_plans.layouts import shard_ranges
from tp_plans.styles import AllReduceOutput, ExpertsParallel, ScaleInput
from tp_plans.torch_styles.base import (
    Args,
    Arguments,
    FirstTensorStyle,
    ForwardContext,
    Kwargs,
    LocalTensorStyle,
    expert_counts,
)
from tp_plans.torch_styles.boundaries import with_summed_gradient
from tp_plans.torch_styles.collectives import own_bounds
from tp_plans.torch_styles.gradients import attach_zero_grads
from tp_plans.torch_styles.placement import plain_full_tensor, redistribute, reduce_output, to_output, wrap


class AllReduceOutputImpl(LocalTensorStyle):
    """``AllReduceOutput``: sums the ranks' outputs, and the gradients of the inputs."""

    style: AllReduceOutput | ExpertsParallel

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs, context: ForwardContext) -> Arguments:
        args, kwargs = _map_tensors(args, kwargs, lambda tensor: _full_with_summed_gradient(tensor, context))
        # Where no token comes to a rank, its output depends on nothing, and backward would leave the others waiting.
        context.saved["read"] = [*own_parameters(module).values(), *args, *kwargs.values()]
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Tensor, context: ForwardContext) -> Tensor:
        layout = self.style.output_layouts
        if not output.requires_grad:
            output = attach_zero_grads(output, context.saved["read"])
        return reduce_output(output, context.mesh, layout, use_local_output=layout == layouts.Replicate())


class ExpertsParallelImpl(AllReduceOutputImpl):
    """``ExpertsParallel``: runs this rank's experts on all tokens, sums over the ranks."""

    # Routes to other ranks' experts get the index that stands for no expert, and the weight zero.
    style: ExpertsParallel

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if not any(parameter is not None for parameter in own_parameters(module).values()):
            raise PlanError(
                f"{type(module).__name__} has no own parameters, so it holds no stacked experts to shard: "
                "ExpertsParallel is for modules that hold them as [experts, ...]"
            )
        mark_expert_parallel(module)

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs, context: ForwardContext) -> Arguments:
        experts = context.shape(next(iter(context.parts)))[0]
        own = range(*own_bounds(experts, context.mesh))
        context.count_own_experts(module, expert_counts(module, experts), own)
        args, kwargs = super().pre_forward(module, args, kwargs, context)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        tokens, index = tensors[0], next((value for value in tensors if not value.is_floating_point()), None)
        if index is None:
            local = _local_tokens(tokens, own, experts, module, context)
            return _map_tensors(args, kwargs, lambda value: local if value is tokens else value)
        skips = self.style.skips_sentinel_index and skips_sentinel_index(module)
        if not skips and not len(shard_ranges(experts, context.mesh.size())[-1]):
            raise LayoutError(
                f"{type(module).__name__} runs every route, and {experts} experts over tp={context.mesh.size()} leave "
                "a rank without any to run: use a smaller tp"
            )
        foreign = (index < own.start) | (index >= own.stop)

        def routed(value: Tensor) -> Tensor:
            if value is index:
                return (index - own.start).masked_fill(foreign, len(own) if skips else 0)
            return value.masked_fill(foreign, 0) if value is not tokens and value.shape == index.shape else value

        return _map_tensors(args, kwargs, routed)

    def post_forward(self, module: nn.Module, output: Tensor, context: ForwardContext) -> Tensor:
        if (tokens := context.saved.get("tokens")) is None:
            return super().post_forward(module, output, context)
        layout = self.style.output_layouts
        gathered = redistribute(wrap(output, context.mesh, 0, size=tokens), layout)
        return to_output(gathered, use_local_output=layout == layouts.Replicate())


class ScaleInputImpl(FirstTensorStyle):
    """``ScaleInput``: a rank's share of an output that every rank computes in full."""

    style: ScaleInput

    def enter(self, module: nn.Module, tensor: Tensor, context: ForwardContext) -> Tensor:
        return tensor / context.mesh.size()


def _map_tensors(args: Args, kwargs: Kwargs, change: Callable[[Tensor], Tensor]) -> Arguments:
    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else value

    return tuple(changed(value) for value in args), {name: changed(value) for name, value in kwargs.items()}


def _full_with_summed_gradient(tensor: Tensor, context: ForwardContext) -> Tensor:
    """Return a full plain tensor; each rank computes a partial sum of its gradient."""
    full: Tensor = plain_full_tensor(tensor, context.mesh)
    return with_summed_gradient(full, context.mesh) if full.requires_grad else full


def _local_tokens(tokens: Tensor, own: range, experts: int, module: nn.Module, context: ForwardContext) -> Tensor:
    """Return this rank's part of ``[experts * tokens, hidden]``."""
    if tokens.shape[0] % experts or experts % context.mesh.size():
        raise LayoutError(
            f"{type(module).__name__} takes every expert's tokens in turn, [experts * tokens, hidden], but got "
            f"{list(tokens.shape)} for {experts} experts over tp={context.mesh.size()}: the first dim must be a "
            "multiple of the experts, and the experts of tp"
        )
    context.saved["tokens"] = tokens.shape[0]
    each = tokens.shape[0] // experts
    return tokens[own.start * each : own.stop * each]
