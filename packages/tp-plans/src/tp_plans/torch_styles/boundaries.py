"""Between plain tensors and DTensors, and from one placement to another: one autograd function each.

``DTensor.from_local``, ``to_local`` and ``redistribute`` take five to ten times as long on the host, of which a layer
would spend most of its time.  Compiled code has none of these costs and traces the public calls.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tp_plans.torch_styles._dtensor_compat import local_of, make_dtensor, make_spec, spec_of, with_spec
from tp_plans.torch_styles._function_compat import direct
from tp_plans.torch_styles.collectives import all_reduce, gather, own_part, reduce_scatter

_REPLICATE, _PARTIAL = Replicate(), Partial()
_ENTERED = "_tp_plans_entered"


def local_part(tensor: DTensor, gradient: Placement | None = None) -> Tensor:
    """Return this rank's part as a plain tensor.

    Args:
        tensor: a DTensor over a one-axis mesh.
        gradient: how the gradient of the part lies across the ranks; as ``tensor`` if it is not given, but replicated
            for partial sums.
    """
    if torch.compiler.is_compiling() or not tensor.is_contiguous():
        return tensor.to_local(grad_placements=None if gradient is None else [gradient])
    if not torch.is_grad_enabled():
        return tensor.to_local()
    return cast(Tensor, _local_part(tensor, _spec_of_gradient(tensor, gradient)))


def summed_gradient(tensor: DTensor) -> Tensor:
    """Return a replicated tensor as a plain tensor, of whose gradient each rank has a part."""
    if torch.compiler.is_compiling() or not (tensor.requires_grad and torch.is_grad_enabled()):
        return with_summed_gradient(local_part(tensor), tensor.device_mesh)
    return cast(Tensor, _summed_part(tensor, _spec_of_gradient(tensor, None)))


def with_summed_gradient(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a plain tensor that is replicated over a mesh, of whose gradient each rank has a part."""
    if torch.compiler.is_compiling():
        return cast(Tensor, _SumGradient.apply(local, mesh))  # type: ignore[no-untyped-call]
    return cast(Tensor, _sum_gradient(local, mesh))


def entered(tensor: DTensor) -> Tensor:
    """Return a replicated tensor in full, for a module of which each rank computes a part of the tensor's gradient.

    Modules with one input (the projections of queries, keys and values) share one plain tensor, so that their gradients
    are added as plain tensors and become a DTensor once.
    """
    if torch.compiler.is_compiling() or not (tensor.requires_grad and torch.is_grad_enabled()):
        return local_part(tensor, _PARTIAL)
    history, known = vars(tensor).get(_ENTERED, (None, None))
    if known is None or history is not tensor.grad_fn:  # a change in place, which has a gradient, is a new history
        history, known = tensor.grad_fn, local_part(tensor, _PARTIAL)
        if history is not None:
            setattr(tensor, _ENTERED, (history, known))
    return cast(Tensor, known)


def from_part(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size | None = None) -> DTensor:
    """Return a DTensor over this rank's part of it; its ``shape`` is needed where the parts differ in size."""
    if placement.is_shard() and cast(Shard, placement).dim < 0:
        placement = Shard(cast(Shard, placement).dim % local.ndim)
    if torch.compiler.is_compiling() or not local.is_contiguous():
        return _from_local(local, mesh, placement, shape)
    if shape is None:
        shape = local.shape
        if placement.is_shard():
            dim = cast(Shard, placement).dim
            shape = torch.Size((*shape[:dim], shape[dim] * mesh.size(), *shape[dim + 1 :]))
    return cast(DTensor, _from_part(local, make_spec(mesh, placement, shape, local.dtype), _of_gradient(placement)))


def moved(tensor: DTensor, wanted: Placement) -> DTensor:
    """Return a tensor in another placement; the backward moves the gradient the other way."""
    return cast(DTensor, _moved(tensor, wanted))


def summed(partial: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the ranks' tensors, in memory of its own; its gradient is replicated and goes to each."""
    return cast(Tensor, _sum(partial, mesh))


def scattered(partial: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Return the sum of the ranks' tensors, sharded on a dim."""
    return cast(DTensor, _scatter(partial, mesh, dim))


def part_in(tensor: DTensor, wanted: Placement) -> Tensor:
    """Return this rank's part of a tensor in another placement, without a gradient."""
    (placement,) = tensor.placements
    mesh, local = tensor.device_mesh, local_of(tensor)
    if placement == wanted:
        return local
    if wanted.is_replicate():
        if placement == _PARTIAL:
            return all_reduce(local, mesh)
        if placement.is_shard():
            dim = cast(Shard, placement).dim
            return gather(local, mesh, dim, tensor.shape[dim])
    elif wanted.is_shard():
        if placement == _PARTIAL:
            return reduce_scatter(local, mesh, cast(Shard, wanted).dim)
        if placement.is_replicate():
            return own_part(local, mesh, cast(Shard, wanted).dim)
    return tensor.redistribute(placements=[wanted]).to_local()


def _from_local(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size | None) -> DTensor:
    if shape is None:
        return DTensor.from_local(local, mesh, [placement], run_check=False)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _of_gradient(placement: Placement) -> Placement:
    """Return how the gradient of what has a placement lies: that of partial sums is replicated."""
    return _REPLICATE if placement.is_partial() else placement


def _spec_of_gradient(tensor: DTensor, gradient: Placement | None) -> Any:
    (placement,) = tensor.placements
    if gradient is None:
        gradient = _of_gradient(placement)
    if gradient == placement:
        return spec_of(tensor)
    return make_spec(tensor.device_mesh, gradient, tensor.shape, tensor.dtype)


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, spec: Any) -> Tensor:
        ctx.spec = spec
        local = local_of(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[DTensor, None]:
        return with_spec(gradient.contiguous(), ctx.spec), None


class _SummedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, spec: Any) -> Tensor:
        ctx.spec, ctx.mesh = spec, tensor.device_mesh
        local = local_of(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[DTensor, None]:
        return with_spec(all_reduce(gradient, ctx.mesh), ctx.spec), None


class _SumGradient(torch.autograd.Function):
    """Identity forward; the sum over the mesh backward (Megatron-LM's ``f``, arXiv:1909.08053)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.mesh), None


class _FromPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: Any, gradient: Placement) -> DTensor:
        ctx.gradient = gradient
        return with_spec(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None, None]:
        return part_in(gradient, ctx.gradient), None, None


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, wanted: Placement) -> DTensor:
        (placement,) = tensor.placements
        ctx.mesh, ctx.gradient = tensor.device_mesh, _of_gradient(placement)
        return make_dtensor(part_in(tensor, wanted), tensor.device_mesh, wanted, tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        return make_dtensor(part_in(gradient, ctx.gradient), ctx.mesh, ctx.gradient, gradient.shape), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, mesh: DeviceMesh) -> Tensor:
        return all_reduce(partial, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
        return make_dtensor(reduce_scatter(partial, mesh, dim), mesh, Shard(dim), partial.shape)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None, None]:
        return part_in(gradient, _REPLICATE), None, None


_local_part, _summed_part, _sum_gradient = direct(_LocalPart), direct(_SummedPart), direct(_SumGradient)
_from_part, _moved, _sum, _scatter = direct(_FromPart), direct(_Moved), direct(_Summed), direct(_Scattered)
