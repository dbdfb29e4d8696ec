"""Plain views of DTensors; their gradients have the placements of the parameter or activation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tp_plans.styles import ParameterStyle
from tp_plans.torch_styles.boundaries import from_part, local_parameter, local_part, summed_gradient


def local_view(parameter: DTensor) -> Tensor:
    """Return the plain local shard of a parameter; its gradient has the parameter's layout."""
    if not torch.compiler.is_compiling():
        return local_parameter(parameter)
    local = parameter.to_local()
    return cast(Tensor, _DenseGradient.apply(local)) if _is_uneven(parameter) else local  # type: ignore[no-untyped-call]


def full_view(parameter: DTensor, *, partial: bool = False) -> Tensor:
    """Return the full tensor of a sharded parameter as a plain tensor; each rank keeps its part of the gradient."""
    # ``partial``: each rank computes a part of the gradient, and the parts are summed.
    source = parameter if torch.is_grad_enabled() else _detach(parameter)
    full = source.redistribute(placements=[Replicate()])
    plain = full.to_local(grad_placements=[Partial() if partial else Replicate()])
    return cast(Tensor, _DenseGradient.apply(plain)) if _is_uneven(parameter) else plain  # type: ignore[no-untyped-call]


def parameter_view(rule: ParameterStyle, parameter: DTensor) -> Tensor:
    """Return the local shard, or the full tensor, of a bare parameter; its gradient has the parameter's layout."""
    partial = rule.gradient == "partial"
    if rule.gathered:
        return full_view(parameter, partial=partial)
    return summed_gradient(parameter) if partial else local_view(parameter)


def _detach(parameter: DTensor) -> DTensor:
    """Return the same shard without a gradient: torch 2.11 cannot redistribute the other in inference mode."""
    local, shape, stride = parameter.to_local(), parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _is_uneven(parameter: DTensor) -> bool:
    """Return whether the local shards differ in size."""
    (cut,) = parameter.placements
    return isinstance(cut, Shard) and parameter.shape[cut.dim] % parameter.device_mesh.size() > 0


class _DenseGradient(torch.autograd.Function):
    """Identity forward; backward copies an expanded gradient, as of a sum, to new memory."""

    # torch 2.11 takes the strides of the DTensor from the expanded gradient, and accumulation makes a replicated copy.

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def to_local_writable(tensor: DTensor) -> Tensor:
    """Return this rank's part as a plain tensor that model code may change in place: no view, unlike ``to_local``."""
    return cast(Tensor, _ToLocalWritable.apply(tensor))  # type: ignore[no-untyped-call]


class _ToLocalWritable(torch.autograd.Function):
    """The local tensor forward; its gradient has the DTensor's layout."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        ctx.shape, ctx.stride = tensor.shape, tensor.stride()
        return tensor.to_local()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return DTensor.from_local(
            gradient, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


def contiguous_part(tensor: DTensor) -> DTensor:
    """Return ``tensor`` with this rank's part contiguous, where parts of unequal length leave a view of padded rows."""
    # Compiled code guards on strides and on a view's base, and would be compiled once more for a view.
    (placement,) = tensor.placements
    return from_part(local_part(tensor).contiguous(), tensor.device_mesh, placement, tensor.shape)


def attach_zero_grads(output: Tensor, on: Iterable[object]) -> Tensor:
    """Return the output with zero gradients, instead of absent ones, for tensors that it does not depend on."""
    tensors = [value for value in on if isinstance(value, Tensor) and value.requires_grad]
    if not tensors or not torch.is_grad_enabled():
        return output
    return cast(Tensor, _AttachZeroGrads.apply(output, *tensors))  # type: ignore[no-untyped-call]


class _AttachZeroGrads(torch.autograd.Function):
    """Identity in the output forward; zeros backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *tensors: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        return None, *zeros
