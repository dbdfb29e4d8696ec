"""Plain views of DTensors whose gradients come back as the parameter or activation lies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard


def local_view(parameter: DTensor) -> Tensor:
    """This rank's plain part of a parameter, whose gradient lies as the parameter does."""
    (cut,) = parameter.placements
    uneven = isinstance(cut, Shard) and cut.dim > 0 and parameter.shape[cut.dim] % parameter.device_mesh.size()
    if uneven and parameter.requires_grad and torch.is_grad_enabled():
        return cast(Tensor, _UnevenView.apply(parameter))  # type: ignore[no-untyped-call]
    return parameter.to_local()


class _UnevenView(torch.autograd.Function):
    """``to_local`` for parts of different width.

    torch 2.10's own takes the gradient's strides from this rank's width; they are not the parameter's then, and
    gradient accumulation answers with a replicated copy.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        return parameter.to_local()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return DTensor.from_local(
            gradient, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


def summed_gradient(whole: DTensor) -> Tensor:
    """A replicated tensor's local view whose gradient is summed over the axis, so every rank gets the full one."""
    return with_summed_gradient(whole.to_local(), whole.device_mesh)


def with_summed_gradient(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same for a tensor that is plain already and whole on every rank of a one-axis mesh."""
    return cast(Tensor, _SumGradient.apply(local, mesh))  # type: ignore[no-untyped-call]


class _SumGradient(torch.autograd.Function):
    """Identity forward; the sum over the mesh backward (Megatron-LM's ``f``, arXiv:1909.08053)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        partial = DTensor.from_local(gradient, ctx.mesh, [Partial()], run_check=False)
        return partial.full_tensor(), None


def plain_output(tensor: DTensor) -> Tensor:
    """This rank's part as a plain tensor of its own, which model code may change in place: no view, as ``to_local``."""
    return cast(Tensor, _Plain.apply(tensor))  # type: ignore[no-untyped-call]


class _Plain(torch.autograd.Function):
    """The local tensor forward; its gradient lies as the DTensor did."""

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


def depending(output: Tensor, on: Iterable[object]) -> Tensor:
    """The output as if computed from tensors that it does not depend on: their gradients are zeros, not absent."""
    tensors = [value for value in on if isinstance(value, Tensor) and value.requires_grad]
    if not tensors or not torch.is_grad_enabled():
        return output
    return cast(Tensor, _Depending.apply(output, *tensors))  # type: ignore[no-untyped-call]


class _Depending(torch.autograd.Function):
    """Identity in the output forward; zeros backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *tensors: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        return None, *zeros
