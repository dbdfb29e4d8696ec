"""Optimizer state by parameter name, to restore it on another mesh or in another order of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from fsdp_runtime.errors import CheckpointError, MismatchError, OptionError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.sharded.boxes import zeros_by_rows
from fsdp_runtime.training_state.directory import StoredTensor

#: Placement of a state tensor: as its parameter; as its parameter's rows, with another last dim; replicated over the
#: mesh of a DTensor parameter; or plain.
StatePlacement = Literal["parameter", "parameter on the cpu", "rows", "replicated", "plain", "plain on the cpu"]


#: Keys of an optimizer's metadata with values by parameter.
_BY_PARAMETER = ("placements", "values")


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return zero, one or several optimizers as a list."""
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())


def optimizer_tensors(
    optimizer: Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, str, Tensor, StatePlacement]]:
    """Yield the tensors of an optimizer's state, each after its parameter's name and its key, before its placement."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                name = names[id(parameter)]
                yield name, key, value, _placement(name, key, parameter, value)


def optimizer_metadata(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's class and groups, and its state's non-tensor values and placements."""
    placements: dict[str, dict[str, str]] = {}
    for parameter_name, key, _, placement in optimizer_tensors(optimizer, names):
        placements.setdefault(parameter_name, {})[key] = placement
    values = {
        names[id(parameter)]: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for parameter, state in optimizer.state.items()
    }
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {"class": _class_name(optimizer), "groups": groups, "placements": placements, "values": values}


def merged_metadata(by_rank: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the metadata of the optimizers of all pipeline stages, which have different parameters."""
    (first, expected), *others = by_rank.items()
    merged = [
        {**saved, "groups": [{**group} for group in saved["groups"]], **{key: {**saved[key]} for key in _BY_PARAMETER}}
        for saved in expected
    ]
    for rank, optimizers in others:
        _require_same_settings(first, expected, rank, optimizers)
        for whole, saved in zip(merged, optimizers, strict=True):
            for group, more in zip(whole["groups"], saved["groups"], strict=True):
                group["params"] = list(dict.fromkeys([*group["params"], *more["params"]]))
            for key in _BY_PARAMETER:
                whole[key] = {**saved[key], **whole[key]}
    return merged


def _require_same_settings(
    first: int, expected: Sequence[Mapping[str, Any]], rank: int, optimizers: Sequence[Mapping[str, Any]]
) -> None:
    one, other = ([(saved["class"], *map(_settings, saved["groups"])) for saved in s] for s in (expected, optimizers))
    if one != other:
        pairs = zip_longest(chain.from_iterable(one), chain.from_iterable(other))
        here, there = next(pair for pair in pairs if pair[0] != pair[1])
        raise OptionError(
            f"optimizer: rank {first} has {here}, and rank {rank} {there}: give every pipeline stage the same "
            'optimizers and groups, as param_groups(model) does; groups may be empty, as {"params": [], "lr": 0.1}'
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in group.items() if key != "params"}
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in values.items()}


def of_parameters(saved: Mapping[str, Any], absent: Collection[str]) -> dict[str, Any]:
    """Return an optimizer's metadata without the parameters of other pipeline stages."""
    groups = [{**g, "params": [name for name in g["params"] if name not in absent]} for g in saved["groups"]]
    by_parameter = {key: {n: value for n, value in saved[key].items() if n not in absent} for key in _BY_PARAMETER}
    return {**saved, "groups": groups, **by_parameter}


def parameter_names(entries: Sequence[StateEntry], optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """Return the names of the model's parameters by ``id``; refuse optimizers that hold other parameters."""
    names = {id(entry.tensor): entry.names[0] for entry in entries}
    for index, optimizer in enumerate(optimizers):
        unknown = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
        if unknown:
            raise OptionError(
                f"optimizer {index} holds {len(unknown)} parameters that are not the model's, the first of shape "
                f"{tuple(unknown[0].shape)}: build it over model.parameters() after parallelize(model, ...)"
            )
    return names


def require_same_optimizer(
    index: int, optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]
) -> None:
    """Refuse the saved state of another class or of other groups."""
    if (name := saved.get("class")) != _class_name(optimizer):
        raise MismatchError(
            f"optimizer {index} is a {_class_name(optimizer)}, and the state of a {name} was saved: build that "
            "optimizer, or pass optimizer=None to load the rest"
        )
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    expected = [group["params"] for group in saved["groups"]]
    if len(groups) != len(expected):
        raise MismatchError(f"optimizer {index} has {len(groups)} parameter groups, the saved one {len(expected)}")
    for number, (have, want) in enumerate(zip(groups, expected, strict=True)):
        if differing := sorted(set(have) ^ set(want)):
            raise MismatchError(
                f"group {number} of optimizer {index} has {len(have)} parameters and the saved one {len(want)}; in "
                f"only one of them: {', '.join(differing[:8])}. Build the optimizer as for the saved run"
            )


def _class_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def require_saved_optimizer(path: Path, index: int, saved: Any, tensors: Mapping[str, StoredTensor]) -> None:
    """Check that ``saved``, read from ``path``, has the form of :func:`optimizer_metadata`."""
    try:
        if not all(isinstance(item, dict) for item in (*saved["groups"], *saved["values"].values())):
            raise TypeError("a group or the values of a parameter are no dict")
        held = {name for group in saved["groups"] for name in group["params"]}
        if foreign := (saved["values"].keys() | saved["placements"].keys()) - held:
            raise ValueError(f"{sorted(foreign)[0]} is in no group")
        for name, placements in saved["placements"].items():
            for key, placement in placements.items():
                stored = tensors[f"optimizer/{index}/{name}/{key}"]
                if placement not in get_args(StatePlacement):
                    raise ValueError(f"{key} of {name} has the placement {placement!r:.80}")
                if placement.startswith("parameter") and stored.shape != tensors[f"model/{name}"].shape:
                    raise ValueError(f"{key} of {name} has the shape {stored.shape}, unlike its parameter")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: optimizer {index} is not in the saved form ({error!r}): resume from an older state"
        ) from error


def restore_optimizer(
    index: int,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
) -> Iterator[tuple[str, Tensor]]:
    """Restore an optimizer's settings; replace its state by empty tensors, and yield them by name in the manifest."""
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in settings.items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)  # schedulers and compiled steps keep references to it
            elif key != "params":
                group[key] = value
    optimizer.state.clear()
    for name, values in saved["values"].items():
        optimizer.state[parameters[name]] = dict(values)
    for name, placements in saved["placements"].items():
        for key, placement in placements.items():
            stored = tensors[path := f"optimizer/{index}/{name}/{key}"]
            tensor = _empty(parameters[name], stored.shape, getattr(torch, stored.dtype), placement)
            optimizer.state[parameters[name]][key] = tensor
            yield path, tensor


def _placement(name: str, key: str, parameter: Tensor, value: Tensor) -> StatePlacement:
    if type(value) not in (Tensor, DTensor, torch.nn.Parameter):
        raise OptionError(
            f"the optimizer keeps {key} of {name} as a {type(value).__name__}, which cannot be saved yet: use an "
            "optimizer that keeps plain tensors or DTensors"
        )
    if 1 < value.ndim == parameter.ndim and value.shape[:-1] == parameter.shape[:-1] and value.shape != parameter.shape:
        return "rows"
    if isinstance(value, DTensor) and value.shape != parameter.shape:
        return "replicated"
    if isinstance(value, DTensor):
        return "parameter" if value.device == parameter.device else "parameter on the cpu"
    if isinstance(parameter, DTensor) and value.numel() > 1:
        raise OptionError(
            f"the optimizer keeps {key} of {name} as a plain tensor of shape {tuple(value.shape)}, and the parameter "
            "is a DTensor: its placement is unknown; keep it as a DTensor"
        )
    if value.shape == parameter.shape and value.device == parameter.device:
        return "parameter"
    return "plain on the cpu" if value.device.type == "cpu" else "plain"


def _empty(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, placement: StatePlacement) -> Tensor:
    device = torch.device("cpu") if placement.endswith("on the cpu") else parameter.device
    if placement.startswith("parameter"):
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    if placement == "rows":
        return zeros_by_rows(parameter, shape[-1], dtype)
    plain = torch.empty(shape, dtype=dtype, device=device)
    if placement == "replicated" and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return plain
