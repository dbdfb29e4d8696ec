"""Optimizer state by the names of the parameters, so that it fits another mesh and another order of construction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from fsdp_runtime.errors import MismatchError, OptionError
from fsdp_runtime.model.state import Entry

#: How a tensor of the state lies: as its parameter does, whole beside a DTensor parameter, or plain.
Layout = Literal["parameter", "replicated", "plain", "plain on the cpu"]


@dataclass(frozen=True)
class StateTensor:
    """A tensor of an optimizer's state: whose it is, what the optimizer calls it, and how it lies."""

    parameter: str
    key: str
    tensor: Tensor
    layout: Layout


def state_tensors(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[StateTensor]:
    """Every tensor of an optimizer's state.

    Args:
        optimizer: the optimizer.
        names: the parameters' names by ``id``, from :func:`parameter_names`.

    Raises:
        OptionError: a tensor of which nothing tells how it lies.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                name = names[id(parameter)]
                yield StateTensor(name, key, value, _layout(name, key, parameter, value))


def description(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """What of an optimizer is no tensor of its state: groups with their settings, and how the tensors lie."""
    layouts: dict[str, dict[str, str]] = {}
    for item in state_tensors(optimizer, names):
        layouts.setdefault(item.parameter, {})[item.key] = item.layout
    values = {
        names[id(parameter)]: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for parameter, state in optimizer.state.items()
    }
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {"groups": groups, "layouts": layouts, "values": values}


def parameter_names(found: Sequence[Entry], optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """The names of the model's parameters by ``id``.

    Raises:
        OptionError: an optimizer has parameters that the model has not.
    """
    names = {id(entry.tensor): entry.names[0] for entry in found}
    for number, optimizer in enumerate(optimizers):
        strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
        if strangers:
            raise OptionError(
                f"optimizer {number} holds {len(strangers)} parameters that are not the model's, the first of shape "
                f"{tuple(strangers[0].shape)}: build it over model.parameters() after parallelize(model, ...)"
            )
    return names


def require_same_groups(number: int, optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Raise :class:`MismatchError` unless an optimizer's groups hold the parameters that were saved."""
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    wanted = [group["params"] for group in saved["groups"]]
    if len(groups) != len(wanted):
        raise MismatchError(f"optimizer {number} has {len(groups)} parameter groups, the saved one {len(wanted)}")
    for place, (have, want) in enumerate(zip(groups, wanted, strict=True)):
        if differing := sorted(set(have) ^ set(want)):
            raise MismatchError(
                f"group {place} of optimizer {number} has {len(have)} parameters and the saved one {len(want)}; in one "
                f"of them only: {', '.join(differing[:8])}. Build the optimizer as for the saved run"
            )


def restore(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], saved: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Give an optimizer its saved settings, and a state of empty tensors, which the caller fills.

    Args:
        optimizer: the optimizer; what state it has is dropped.
        parameters: the model's parameters by name.
        saved: from :func:`description`.
        tensors: shape and dtype of every saved tensor, by ``<parameter>/<key>``.

    Yields:
        ``<parameter>/<key>`` and the tensor to fill.
    """
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in settings.items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)  # schedulers and compiled steps hold on to it
            elif key != "params":
                group[key] = value
    optimizer.state.clear()
    for name, values in saved["values"].items():
        optimizer.state[parameters[name]] = dict(values)
    for name, layouts in saved["layouts"].items():
        for key, layout in layouts.items():
            shape, dtype = tensors[f"{name}/{key}"]
            tensor = _empty(parameters[name], shape, dtype, layout)
            optimizer.state[parameters[name]][key] = tensor
            yield f"{name}/{key}", tensor


def _layout(name: str, key: str, parameter: Tensor, value: Tensor) -> Layout:
    if type(value) not in (Tensor, DTensor, torch.nn.Parameter):
        raise OptionError(f"the optimizer keeps {key} of {name} as a {type(value).__name__}, which cannot be saved yet")
    if isinstance(value, DTensor):
        return "parameter" if value.shape == parameter.shape else "replicated"
    if isinstance(parameter, DTensor) and value.numel() > 1:
        raise OptionError(
            f"the optimizer keeps {key} of {name} as a plain tensor of shape {tuple(value.shape)}, and the parameter "
            "is a DTensor: nothing tells how it is cut; keep it as a DTensor"
        )
    if value.shape == parameter.shape and value.device == parameter.device:
        return "parameter"
    return "plain on the cpu" if value.device.type == "cpu" else "plain"


def _empty(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> Tensor:
    if layout == "parameter":
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = torch.device("cpu") if layout == "plain on the cpu" else parameter.device
    plain = torch.empty(shape, dtype=dtype, device=device)
    if layout == "replicated" and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return plain
