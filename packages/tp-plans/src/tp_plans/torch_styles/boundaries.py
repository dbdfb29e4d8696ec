"""Between plain tensors and DTensors, and from one placement to another: one autograd function each.

``DTensor.from_local``, ``to_local`` and ``redistribute`` take five to ten times as long on the host, which would be
most of a layer's host time.  Compiled code has none of these costs and traces the public calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tp_plans.torch_styles._host_time_compat import direct, local_of, make_dtensor, make_spec, spec_of, with_spec
from tp_plans.torch_styles.collectives import all_reduce, gather, own_part, reduce_scatter

_REPLICATE, _PARTIAL = Replicate(), Partial()
_ENTERED, _SHARED, _PART, _TAKEN = "_tp_plans_entered", "_tp_plans_shared", "_tp_plans_part", "_tp_plans_taken"


def is_recorded(tensor: Tensor) -> bool:
    """Return whether autograd in eager code records operations on a contiguous tensor."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return tensor.requires_grad and tensor.is_contiguous()


def local_part(tensor: DTensor, gradient: Placement | None = None) -> Tensor:
    """Return this rank's part of a DTensor over one axis as a plain tensor."""
    # The gradient lies across the ranks as the tensor by default, but replicated for partial sums.
    if is_recorded(tensor):
        parts: Sequence[Tensor] = _parts((_spec_of_gradient(tensor, gradient),), (False,), None, tensor)
        return parts[0]
    if torch.compiler.is_compiling() or not tensor.is_contiguous():
        return tensor.to_local(grad_placements=None if gradient is None else [gradient])
    return local_of(tensor)


def local_parts(
    tensors: Sequence[DTensor], is_partial: Sequence[bool] | None = None, scale: float | None = None
) -> Sequence[Tensor]:
    """Return this rank's parts of DTensors as plain tensors, by one autograd function in eager code."""
    # A gradient lies across the ranks as the tensor, Replicate or Shard. Where ``is_partial``, it is summed over the
    # ranks. Eager code multiplies it by ``scale``.
    is_partial = is_partial or [False] * len(tensors)
    is_eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    recorded = [is_eager and tensor.requires_grad and tensor.is_contiguous() for tensor in tensors]
    if all(recorded) and tensors:
        parts: Sequence[Tensor] = _parts([spec_of(tensor) for tensor in tensors], is_partial, scale, *tensors)
        return parts
    following: Iterator[Tensor] = iter(())
    if any(recorded):
        following = iter(local_parts(list(compress(tensors, recorded)), list(compress(is_partial, recorded)), scale))
    reads = zip(tensors, is_partial, recorded, strict=True)
    return [next(following) if made else _one_part(tensor, partial, scale) for tensor, partial, made in reads]


def _one_part(tensor: DTensor, is_partial: bool, scale: float | None) -> Tensor:
    part = local_part(tensor)
    if is_partial and part.requires_grad:
        part = with_summed_gradient(part, tensor.device_mesh)
    return scaled_gradient(part, scale)


def local_parameter(parameter: DTensor) -> Tensor:
    """Return this rank's part of a parameter as a plain tensor; its gradient has the parameter's placement."""
    part: Tensor | None = None if torch.compiler.is_compiling() else vars(parameter).get(_PART)
    return local_part(parameter) if part is None else part


def scaled_gradient(tensor: Tensor, scale: float | None) -> Tensor:
    """Return a tensor, in eager code, with its gradient multiplied by a number, if one is given."""
    if scale is None or not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    scaled: Tensor = _scale_gradient(tensor, scale)
    return scaled


def share_parts(parameters: Sequence[DTensor]) -> Sequence[DTensor]:
    """Apply :func:`local_parameter` to parameters by one autograd function, and share the results until dropped."""
    # One may come twice. Returns the parameters for ``drop_parts``.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return []
    distinct = {id(tensor): tensor for tensor in parameters if tensor.requires_grad and tensor.is_contiguous()}
    read = list(distinct.values())
    if len(read) < 2:
        return []
    for parameter, part in zip(read, local_parts(read), strict=True):
        vars(parameter)[_PART] = part
    return read


def drop_parts(parameters: Sequence[DTensor]) -> None:
    """Drop the results of :func:`share_parts`."""
    for parameter in parameters:
        vars(parameter).pop(_PART, None)


def summed_gradient(tensor: DTensor) -> Tensor:
    """Return a replicated tensor as a plain tensor with a partial gradient on each rank."""
    return local_parts([tensor], [True])[0]


def with_summed_gradient(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a plain tensor that is replicated over a mesh, with a partial gradient on each rank."""
    if torch.compiler.is_compiling():
        return _SumGradient.apply(local, mesh)  # type: ignore[no-any-return, no-untyped-call]
    entered: Tensor = _sum_gradient(local, mesh)
    return entered


def enter(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a full tensor on every rank, for code with a partial gradient on each rank."""
    # It is made with the plain tensor that ``entered`` gives for it, by one autograd function: modules with one input
    # (the projections of queries, keys and values) share that, so that their gradients are added as plain tensors and
    # none becomes a DTensor. The tensor is contiguous: plain and the same on every rank, or a DTensor.
    if torch.compiler.is_compiling():  # in a separate graph, as above
        if isinstance(tensor, DTensor):
            return tensor.redistribute(placements=[_REPLICATE])
        return _from_local(tensor, mesh, _REPLICATE, None)
    full, part = _enter(tensor, mesh, make_spec(mesh, _REPLICATE, tensor.shape, tensor.dtype))
    setattr(full, _ENTERED, (full.grad_fn, part))
    return full  # type: ignore[no-any-return]


def entered(tensor: DTensor) -> Tensor:
    """Return a replicated tensor in full, for a module that leaves a partial gradient on each rank."""
    # Modules with one input share one plain tensor.
    if torch.compiler.is_compiling():
        return local_part(tensor, _PARTIAL)
    known = _known(tensor, _ENTERED)
    return _remembered(tensor, _ENTERED, local_part(tensor, _PARTIAL)) if known is None else known


def known_part(tensor: DTensor, mesh: DeviceMesh) -> Tensor | None:
    """Return the earlier result of :func:`entered` for a tensor of a mesh, for eager code."""
    return _known(tensor, _ENTERED) if spec_of(tensor).mesh is mesh else None


def shared_part(tensor: DTensor) -> Tensor:
    """Return this rank's part of a tensor, which modules with one input share; its gradient is placed as the tensor."""
    if torch.compiler.is_compiling():
        return local_part(tensor)
    known = _known(tensor, _SHARED)
    return _remembered(tensor, _SHARED, local_part(tensor)) if known is None else known


def _known(tensor: DTensor, name: str) -> Tensor | None:
    remembered: tuple[Any, Tensor] | None = vars(tensor).get(name)
    if remembered is None or not torch.is_grad_enabled():
        return None
    return remembered[1] if remembered[0] is tensor.grad_fn else None  # a change in place is a new history


def _remembered(tensor: DTensor, name: str, part: Tensor) -> Tensor:
    history = tensor.grad_fn
    if history is not None and torch.is_grad_enabled():  # a tensor that is a leaf would be kept alive by its part
        setattr(tensor, name, (history, part))
    return part


def from_part(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size | None = None) -> DTensor:
    """Return a DTensor over this rank's part of it; its ``shape`` is needed where the parts differ in size."""
    if type(placement) is Shard and placement.dim < 0:
        placement = Shard(placement.dim % local.ndim)
    if torch.compiler.is_compiling() or not local.is_contiguous():
        return _from_local(local, mesh, placement, shape)
    if shape is None:
        shape = local.shape
        if type(placement) is Shard:
            dim = placement.dim
            shape = torch.Size((*shape[:dim], shape[dim] * mesh.size(), *shape[dim + 1 :]))
    wrapped: DTensor = _from_part(local, make_spec(mesh, placement, shape, local.dtype), _of_gradient(placement))
    return wrapped


def part_in(tensor: DTensor, target: Placement) -> Tensor:
    """Return this rank's part of a tensor in another placement, without a gradient."""
    spec = spec_of(tensor)
    (placement,), mesh, local = spec.placements, spec.mesh, local_of(tensor)
    if same(placement, target):
        return local
    if is_sum(placement) and not target.is_partial():
        return _sum_in(local, mesh, target)
    if type(placement) is Shard and type(target) is Replicate:
        return gather(local, mesh, placement.dim, tensor.shape[placement.dim])
    if type(target) is Shard and type(placement) is Replicate:
        return own_part(local, mesh, target.dim)
    return tensor.redistribute(placements=[target]).to_local()


def _sum_in(partial: Tensor, mesh: DeviceMesh, target: Placement) -> Tensor:
    """Return this rank's part of the sum over the ranks in a placement."""
    return reduce_scatter(partial, mesh, target.dim) if type(target) is Shard else all_reduce(partial, mesh)


def same(one: Placement, other: Placement) -> bool:
    """Return whether two placements are equal; where their types differ torch takes 14 us to say so."""
    return type(one) is type(other) and (type(one) is Replicate or one == other)


def same_mesh(tensor: DTensor, mesh: DeviceMesh) -> bool:
    """Return whether a tensor is on a mesh, or on an equal one, as the meshes are that a process makes twice."""
    own = tensor.device_mesh  # not of its spec, which the compiler does not trace
    return own is mesh or own == mesh


def is_sum(placement: Placement) -> bool:
    """Return whether a placement is a partial sum."""
    return type(placement) is Partial and placement.reduce_op == "sum"


def _from_local(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size | None) -> DTensor:
    if shape is None:
        return DTensor.from_local(local, mesh, [placement], run_check=False)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _of_gradient(placement: Placement) -> Placement:
    """Return the placement of a gradient, by its tensor's placement: a partial sum's is replicated."""
    return _REPLICATE if placement.is_partial() else placement


def _spec_of_gradient(tensor: DTensor, gradient: Placement | None) -> Any:
    spec = spec_of(tensor)
    (placement,) = spec.placements
    if gradient is None:
        if not placement.is_partial():
            return spec
        gradient = _REPLICATE
    return spec if same(placement, gradient) else make_spec(spec.mesh, gradient, tensor.shape, tensor.dtype)


def unshared(gradient: Tensor) -> Tensor:
    """Return a gradient that no other has: autograd gives added parameters one, and copies plain tensors only."""
    own = gradient.contiguous()
    if _TAKEN in vars(own):
        return own.clone()
    vars(own)[_TAKEN] = True
    return own


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, specs: Sequence[Any], is_partial: Sequence[bool], scale: float | None, *tensors: DTensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.specs, ctx.is_partial, ctx.scale = specs, is_partial, scale
        shards = [local_of(tensor) for tensor in tensors]
        return tuple([shard.view_as(shard) for shard in shards])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        scale, shards = ctx.scale, list(gradients)
        if scale is not None:
            shards = [None if shard is None else shard * scale for shard in shards]
        if True in ctx.is_partial:
            _sum_partial(shards, ctx.is_partial, ctx.specs)
        pairs = zip(shards, ctx.specs, strict=True)
        wrapped = [None if shard is None else with_spec(unshared(shard), spec) for shard, spec in pairs]
        return None, None, None, *wrapped


def _sum_partial(shards: list[Tensor | None], is_partial: Sequence[bool], specs: Sequence[Any]) -> None:
    """Sum partial gradients over the ranks, in place in the list; gradients of one dtype take one collective."""
    places = [index for index, shard in enumerate(shards) if is_partial[index] and shard is not None]
    partial = [cast(Tensor, shards[index]) for index in places]
    if len(partial) < 2 or len({tensor.dtype for tensor in partial}) > 1:
        sums: Any = [all_reduce(tensor, specs[0].mesh) for tensor in partial]
    else:
        total = all_reduce(torch.cat([tensor.reshape(-1) for tensor in partial]), specs[0].mesh)
        # A DTensor of a view at an offset cannot be deep-copied.
        sums = torch.split_with_sizes_copy(total, [tensor.numel() for tensor in partial])  # type: ignore[func-returns-value]  # typed as its out form
    for index, tensor, whole in zip(places, partial, sums, strict=True):
        shards[index] = whole.view(tensor.shape)


class _ScaleGradient(torch.autograd.Function):
    """Identity forward; the gradient times a number backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


class _SumGradient(torch.autograd.Function):
    """Identity forward; the sum over the mesh backward (Megatron-LM's ``f``, arXiv:1909.08053)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.mesh), None


class _Enter(torch.autograd.Function):
    """A replicated DTensor, and this rank's plain tensor of it with a partial gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: DeviceMesh, spec: Any) -> tuple[DTensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.gradient = mesh, None
        if isinstance(tensor, DTensor):
            ctx.gradient = _of_gradient(spec_of(tensor).placements[0])
            tensor = part_in(tensor, _REPLICATE)
        return with_spec(tensor.detach(), spec), tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, of_full: DTensor | None, of_part: Tensor | None) -> tuple[Tensor | None, None, None]:
        target = ctx.gradient or _REPLICATE
        if of_full is not None and of_part is not None and is_sum(of_full.placements[0]):
            of_part = of_part + local_of(of_full)
            of_full = None
        total = None if of_full is None else part_in(of_full, target)
        shape = None
        if of_part is not None:
            shape, summed = of_part.shape, _sum_in(of_part, ctx.mesh, target)
            total = summed if total is None else total + summed
        elif of_full is not None:
            shape = of_full.shape
        if ctx.gradient is None or total is None or shape is None:
            return total, None, None
        return make_dtensor(total, ctx.mesh, target, shape), None, None


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
    def forward(ctx: Any, tensor: DTensor, target: Placement) -> DTensor:
        (placement,) = tensor.placements
        ctx.mesh, ctx.gradient = tensor.device_mesh, _of_gradient(placement)
        return make_dtensor(part_in(tensor, target), tensor.device_mesh, target, tensor.shape)

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


_parts, _enter, _scale_gradient, _sum_gradient = map(direct, (_Parts, _Enter, _ScaleGradient, _SumGradient))
_from_part = direct(_FromPart)
#: Return a tensor in another placement; the backward moves the gradient the other way.
moved: Callable[[DTensor, Placement], DTensor] = direct(_Moved)
#: Return the sum of the ranks' tensors, in new memory; its gradient is replicated and goes to each.
summed: Callable[[Tensor, DeviceMesh], Tensor] = direct(_Summed)
#: Return the sum of the ranks' tensors, sharded on a dim.
scattered: Callable[[Tensor, DeviceMesh, int], DTensor] = direct(_Scattered)
