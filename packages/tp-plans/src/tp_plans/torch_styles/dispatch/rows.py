"""Rows summed by index, and rows divided over the ranks that share them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tp_plans.torch_styles.collectives import gather, own_bounds


def sum_rows(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Return ``[size, ...]``: row ``i`` is the sum of the values with index ``i``."""
    # By ``index_put``, which sums in a fixed order on CUDA, unlike ``index_add``: recomputed activations are the same.
    return values.new_zeros(size, *values.shape[1:]).index_put_((index,), values, accumulate=True)


def split_rows(mesh: DeviceMesh, *tensors: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Return this rank's part, on ``dim``, of tensors that all ranks have in full; gradients come back in full."""
    start, end = own_bounds(tensors[0].shape[dim], mesh)
    exact = [tensor.narrow(dim, start, end - start) for tensor in tensors]
    traced = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    if traced and torch.is_grad_enabled():
        rows_of_rank = _SplitRows.apply(mesh, dim, *(tensors[i] for i in traced))  # type: ignore[no-untyped-call]
        for i, tensor in zip(traced, rows_of_rank, strict=True):
            exact[i] = tensor
    return tuple(exact)


def join_rows(mesh: DeviceMesh, part: Tensor, size: int, *, dim: int = 0) -> Tensor:
    """Gather the parts of an axis' ranks to one tensor; each rank's gradient is its part of the full one."""
    return cast(Tensor, _JoinRows.apply(mesh, part, size, dim))  # type: ignore[no-untyped-call]


class _SplitRows(torch.autograd.Function):
    """A slice of each tensor forward; their gathered gradients backward, in one node and so in one order."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.dim, ctx.size = mesh, dim, tensors[0].shape[dim]
        start, end = own_bounds(ctx.size, mesh)
        return tuple(tensor.narrow(dim, start, end - start).clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *(gather(gradient, ctx.mesh, ctx.dim, ctx.size) for gradient in gradients)


class _JoinRows(torch.autograd.Function):
    """Gather forward; a slice backward, since every rank has the full gradient."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, part: Tensor, size: int, dim: int) -> Tensor:
        ctx.mesh, ctx.dim, ctx.size = mesh, dim, size
        return gather(part, mesh, dim, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        start, end = own_bounds(ctx.size, ctx.mesh)
        return None, gradient.narrow(ctx.dim, start, end - start).contiguous(), None, None
