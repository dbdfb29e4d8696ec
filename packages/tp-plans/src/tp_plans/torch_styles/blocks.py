"""A block that computes on plain tensors: its parameters, and DTensors among its arguments, are unwrapped in one place.

Compiled code then has plain inputs and outputs.  DTensors there double the host time of a layer: torch guards on their
specs, unwraps them in each call, and wraps each gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Size, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tp_plans._torch_compat import own_children, own_parameters
from tp_plans.torch_styles._host_time_compat import spec_of
from tp_plans.torch_styles.base import Part
from tp_plans.torch_styles.boundaries import from_part, local_part, local_parts, same_mesh
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
    is_partial = [False] * len(streams) + [place.part.gradient == "partial" for place in swapped]
    parts = local_parts([*streams.values(), *parameters], is_partial)
    plain = dict(zip(streams, parts, strict=False))
    placed = {key: _placed(tensor, mesh.size()) for key, tensor in streams.items()}
    try:
        for place, part in zip(swapped, parts[len(streams) :], strict=True):
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
