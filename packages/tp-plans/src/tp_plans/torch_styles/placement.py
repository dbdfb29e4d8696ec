"""From layouts to placements, and from local tensors to DTensors and back, without a hidden collective."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tp_plans import layouts
from tp_plans.errors import LayoutError
from tp_plans.layouts import Layout
from tp_plans.torch_styles.boundaries import enter, from_part, is_recorded, moved, same, same_mesh, scattered, summed
from tp_plans.torch_styles.collectives import own_bounds
from tp_plans.torch_styles.gradients import to_local_writable


def placement(layout: Layout) -> Placement:
    """Return torch's placement of the same name."""
    if isinstance(layout, layouts.Shard):
        return Shard(layout.dim)
    return Replicate() if isinstance(layout, layouts.Replicate) else Partial()


def existing_dim(dim: int, tensor: Tensor) -> int:
    """A dim that a tensor has, counted from the first."""
    if not -tensor.ndim <= dim < tensor.ndim:
        has = f"dims 0 to {tensor.ndim - 1}" if tensor.ndim else "none"
        raise LayoutError(
            f"a tensor of shape {list(tensor.shape)} has no dim {dim} to shard, it has {has}: correct the "
            f"Shard({dim}) or sequence_dim={dim} of the rule"
        )
    return dim % tensor.ndim


def as_dtensor(tensor: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """Return a DTensor unchanged, and a plain tensor as a DTensor in ``layout``."""
    if isinstance(tensor, DTensor):
        if not same_mesh(tensor, mesh):
            raise LayoutError(
                f"a DTensor on the mesh {tensor.device_mesh} came to a module that is split over {mesh}: hand it a "
                "plain tensor, or a DTensor on the mesh that the plan was applied to"
            )
        return tensor
    return from_part(tensor, mesh, placement(layout))


def wrap(local: Tensor, mesh: DeviceMesh, dim: int, *, size: int) -> DTensor:
    """Return a DTensor of ``size`` on ``dim`` over this rank's part; the ranks' parts may differ in size."""
    shape = list(local.shape)
    shape[dim] = size
    return from_part(local, mesh, Shard(dim), torch.Size(shape))


def redistribute(tensor: DTensor, layout: Layout) -> DTensor:
    """Return a tensor in ``layout``; the backward redistributes the gradient the other way."""
    target = placement(layout)
    if isinstance(target, Shard):
        target = Shard(existing_dim(target.dim, tensor))
    if same(tensor.placements[0], target):
        return tensor
    if not torch.compiler.is_compiling():
        return moved(tensor, target)
    if isinstance(target, Shard) and tensor.placements == (Replicate(),):
        return cast(DTensor, _OwnPart.apply(tensor, target.dim))  # type: ignore[no-untyped-call]
    if isinstance(target, Shard) and isinstance(tensor.placements[0], Partial):
        return cast(DTensor, _OwnSum.apply(tensor, target.dim))  # type: ignore[no-untyped-call]
    return tensor.redistribute(placements=[target])


def prepared(tensor: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """An input in ``layout``; a plain tensor is read as replicated."""
    if isinstance(tensor, DTensor):
        arrived = as_dtensor(tensor, mesh, layout)
        if type(arrived.placements[0]) is Replicate:
            return redistribute(arrived, layout)
    if isinstance(layout, layouts.Replicate) and is_recorded(tensor):
        return enter(tensor, mesh)
    return redistribute(as_dtensor(tensor, mesh, layouts.Replicate()), layout)


class _OwnPart(torch.autograd.Function):
    """``DTensor.redistribute`` from ``Replicate`` to ``Shard``; the compiler takes its gradient for any length."""

    # The gradient of torch's own ends in a ``RecursionError`` where the length is symbolic, up to torch 2.14.

    @staticmethod
    def forward(ctx: Any, full: DTensor, dim: int) -> DTensor:
        mesh, size = full.device_mesh, full.shape[dim]
        ctx.dim, ctx.size = dim, size
        start, end = own_bounds(size, mesh)
        own = full.to_local().narrow(dim, start, end - start).clone()
        return wrap(own, mesh, dim, size=size)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        return _replicated(gradient, ctx.dim, ctx.size), None


class _OwnSum(torch.autograd.Function):
    """``DTensor.redistribute`` from ``Partial`` to ``Shard``, for the compiler as above."""

    @staticmethod
    def forward(ctx: Any, partial: DTensor, dim: int) -> DTensor:
        ctx.dim, ctx.size = dim, partial.shape[dim]
        return partial.redistribute(placements=[Shard(dim)])

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        return _replicated(gradient, ctx.dim, ctx.size), None


def _replicated(gradient: DTensor, dim: int, size: int) -> DTensor:
    """Return a gradient on every rank; its size is the forward's, since the compiler may not know its own."""
    if gradient.placements == (Replicate(),):
        return gradient
    own = gradient.redistribute(placements=[Shard(dim)]).to_local()
    return wrap(own, gradient.device_mesh, dim, size=size).redistribute(placements=[Replicate()])


def plain_full_tensor(value: Any, mesh: DeviceMesh) -> Any:
    """Return the full tensor of a DTensor, plain and contiguous as model code expects; other values unchanged."""
    # Until torch 2.12 parts of unequal length leave a view of padded rows.
    if not isinstance(value, DTensor):
        return value
    return redistribute(as_dtensor(value, mesh, layouts.Replicate()), layouts.Replicate()).to_local().contiguous()


def reduce_output(partial: Tensor, mesh: DeviceMesh, layout: Layout, *, use_local_output: bool) -> Tensor:
    """Return the sum over the ranks in ``layout``, as a plain tensor or a DTensor."""
    if not (torch.compiler.is_compiling() or isinstance(partial, DTensor)):
        target = placement(layout)
        if isinstance(target, Replicate) and use_local_output:
            return summed(partial, mesh)
        if isinstance(target, Shard):
            output = scattered(partial, mesh, existing_dim(target.dim, partial))
            return to_output(output, use_local_output=use_local_output)
    moved_to = redistribute(as_dtensor(partial, mesh, layouts.Partial()), layout)
    return to_output(moved_to, use_local_output=use_local_output)


def to_output(output: DTensor, *, use_local_output: bool) -> Tensor:
    """Return an output as this rank's plain tensor, or the DTensor itself."""
    return to_local_writable(output) if use_local_output else output
