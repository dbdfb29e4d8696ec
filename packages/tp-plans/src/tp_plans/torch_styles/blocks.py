"""A block that computes on plain tensors: its parameters, and DTensors among its arguments, are unwrapped in one place.

Compiled code then has plain inputs and outputs.  DTensors there double the host time of a layer: torch guards on their
specs, unwraps them in each call, and wraps each gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tp_plans._torch_compat import own_children, own_parameters
from tp_plans.torch_styles._host_time_compat import direct, local_of, spec_of, with_spec
from tp_plans.torch_styles.base import Part
from tp_plans.torch_styles.boundaries import from_part, local_part, same_mesh, shared_part, unshared
from tp_plans.torch_styles.collectives import all_reduce
from tp_plans.torch_styles.linear import on_first_rank

#: The sharded dim of a tensor, or ``None``, and its full size there, or ``None`` if all ranks' parts have equal sizes.
Placed = tuple[int | None, int | None]


class PlainParameter(NamedTuple):
    """A parameter that this rank's part stands for during the forward of a block."""

    parameters: dict[str, Any]  # of its module
    name: str
    part: Part


def plain_parameters(block: nn.Module, skips: Callable[[nn.Module], bool]) -> list[PlainParameter]:
    """Return the parameters of a block and of the modules below, without modules that ``skips`` names."""
    parameters: list[PlainParameter] = []
    waiting: list[Any] = [block]
    while waiting:
        module = waiting.pop()
        if module is None or skips(module):
            continue
        waiting += own_children(module).values()
        parts: Mapping[str, Part] = getattr(module, "tp_parts", {})
        for name, part in parts.items():
            if part.gradient is not None:
                parameters.append(PlainParameter(own_parameters(module), name, part))
    return parameters


def mesh_of(block: nn.Module) -> DeviceMesh | None:
    """Return the mesh that parameters of a block, or below, are sharded over by a plan, without the mesh of ``ep``."""
    for module in block.modules():
        parts: Mapping[str, Part] = getattr(module, "tp_parts", {})
        if any(part.gradient is not None for part in parts.values()):
            return type(module).tp_mesh  # type: ignore[attr-defined, no-any-return]
    return None


def call_on_plain_tensors(
    run: Callable[..., Any],
    places: Sequence[PlainParameter],
    mesh: DeviceMesh,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call ``run(placed, *args, **kwargs)``, a compiled :func:`plain_forward`, on this rank's tensors."""
    # A parameter that FSDP2 has yet to gather has two axes.
    swapped = [place for place in places if _is_plain_part(place.parameters[place.name])]
    parameters: list[DTensor] = [place.parameters[place.name] for place in swapped]
    streams = {key: value for key, value in (*enumerate(args), *kwargs.items()) if _is_placed(value, mesh)}
    parts = _plain_tensors(parameters, [place.part.gradient == "partial" for place in swapped])
    plain: dict[Any, Tensor] = {key: shared_part(tensor) for key, tensor in streams.items()}
    placed = {key: _placed(tensor, mesh.size()) for key, tensor in streams.items()}
    try:
        for place, part in zip(swapped, parts, strict=True):
            place.parameters[place.name] = on_first_rank(part, mesh) if place.part.gradient == "first" else part
        outputs, placed = run(
            placed,
            *[plain.get(index, value) for index, value in enumerate(args)],
            **{name: plain.get(name, value) for name, value in kwargs.items()},
        )
    finally:
        for place, parameter in zip(swapped, parameters, strict=True):
            place.parameters[place.name] = parameter
    return _changed(outputs, lambda index, value: _dtensor(value, placed.get(index), mesh))


def plain_forward(
    forward: Callable[..., Any],
    mesh: DeviceMesh,
    placed: Mapping[Any, Placed],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Any, dict[int, Placed]]:
    """Run a forward on DTensors that are made of plain tensors, and unwrap its outputs; the compiler traces it."""
    output = forward(
        *[_dtensor(value, placed.get(index), mesh) for index, value in enumerate(args)],
        **{name: _dtensor(value, placed.get(name), mesh) for name, value in kwargs.items()},
    )
    values = output if isinstance(output, (tuple, list)) else (output,)
    sharded = {index: _placed(value) for index, value in enumerate(values) if _is_placed(value, mesh)}
    return _changed(output, lambda index, value: local_part(value) if index in sharded else value), sharded


def _is_plain_part(parameter: Any) -> bool:
    return isinstance(parameter, DTensor) and len(spec_of(parameter).placements) == 1 and parameter.is_contiguous()


def _is_placed(value: Any, mesh: DeviceMesh) -> bool:
    if not (isinstance(value, DTensor) and same_mesh(value, mesh) and value.is_contiguous()):
        return False
    kind = type(value.placements[0])
    return kind is Replicate or kind is Shard  # the compiler takes ``in`` for False (torch 2.13)


def _placed(tensor: DTensor, ranks: int = 0) -> Placed:
    (placement,) = tensor.placements
    if not isinstance(placement, Shard):
        return None, None
    size = tensor.shape[placement.dim]
    return placement.dim, None if ranks and size % ranks == 0 else size


def _dtensor(value: Any, placed: Placed | None, mesh: DeviceMesh) -> Any:
    if placed is None:
        return value
    dim, size = placed
    if dim is None:
        return from_part(value, mesh, Replicate())
    shape = None if size is None else Size((*value.shape[:dim], size, *value.shape[dim + 1 :]))
    return from_part(value, mesh, Shard(dim), shape)


def _changed(output: Any, change: Callable[[int, Any], Any]) -> Any:
    """Change an output, or each item of a tuple or list."""
    if not isinstance(output, (tuple, list)):
        return change(0, output)
    changed = [change(index, value) for index, value in enumerate(output)]
    return changed if isinstance(output, list) else tuple(changed)


def _plain_tensors(parameters: Sequence[DTensor], is_partial: Sequence[bool]) -> Sequence[Tensor]:
    """Return this rank's parts of parameters, in eager code, by one autograd function."""
    if not torch.is_grad_enabled():
        return [local_of(parameter) for parameter in parameters]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return [local_of(parameter) for parameter in parameters]
    partial = [is_sum for is_sum, parameter in zip(is_partial, parameters, strict=True) if parameter.requires_grad]
    parts: Sequence[Tensor] = _plain_parts(partial, *trained)
    if len(trained) == len(parameters):
        return parts
    following = iter(parts)
    return [next(following) if parameter.requires_grad else local_of(parameter) for parameter in parameters]


class _PlainParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, is_partial: Sequence[bool], *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.is_partial, ctx.specs = is_partial, [spec_of(parameter) for parameter in parameters]
        shards = [local_of(parameter) for parameter in parameters]
        return tuple([shard.view_as(shard) for shard in shards])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        own = [None if gradient is None else unshared(gradient) for gradient in gradients]
        partial = [index for index, tensor in enumerate(own) if tensor is not None and ctx.is_partial[index]]
        if partial:
            sums = _all_reduced([cast(Tensor, own[index]) for index in partial], ctx.specs[0].mesh)
            for index, total in zip(partial, sums, strict=True):
                own[index] = total
        pairs = zip(own, ctx.specs, strict=True)
        return None, *[None if gradient is None else with_spec(gradient, spec) for gradient, spec in pairs]


def _all_reduced(tensors: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """Return the sums over the ranks; tensors of one dtype take one collective."""
    if len(tensors) == 1 or len({tensor.dtype for tensor in tensors}) > 1:
        return [all_reduce(tensor, mesh) for tensor in tensors]
    total = all_reduce(torch.cat([tensor.view(-1) for tensor in tensors]), mesh)
    # A DTensor of a view at an offset cannot be deep-copied.
    sizes = [tensor.numel() for tensor in tensors]
    sums: Any = torch.split_with_sizes_copy(total, sizes)  # type: ignore[func-returns-value]  # typed as its out form
    return [part.view(tensor.shape) for part, tensor in zip(sums, tensors, strict=True)]


_plain_parts = direct(_PlainParts)
