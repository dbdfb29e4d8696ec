"""Load a checkpoint into a larger model: into a submodule, with initial values for new heads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.weights.hub_checkpoint import HubTensor
from fsdp_runtime.weights.naming import map_weights

#: Suggested standard deviation for a model without a config: transformers' default.
_DEVIATION = 0.02


def submodule(model: nn.Module, option: str, path: str) -> nn.Module:
    """Return the submodule at ``path``, a value of the user's argument ``option``."""
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        heads = ", ".join(name for name, _ in model.named_children())
        raise OptionError(
            f"{option}: {type(model).__name__} has no module {path!r}; write a path such as {heads}"
        ) from error


def deviation(entry: StateEntry, new: Mapping[str, float]) -> float | None:
    """Return the standard deviation of a tensor of a new module, ``None`` for a tensor of any other module."""
    inside = (std for path, std in new.items() for name in entry.names if name.startswith(f"{path}."))
    return next(inside, None)


def initial_value(model: nn.Module, entry: StateEntry, new: Mapping[str, float]) -> Tensor:
    """Return a tensor's full initial values, drawn from a generator seeded by the tensor's name."""
    name = entry.names[0]
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
    value = torch.zeros(entry.tensor.shape)
    owner, _, attribute = name.rpartition(".")
    if value.ndim > 1:
        value.normal_(std=deviation(entry, new) or 0.0, generator=generator)
    elif attribute == "weight" and "norm" in type(model.get_submodule(owner)).__name__.lower():
        value.fill_(1)
    return value


def how_to_load(
    model: nn.Module,
    entries: Sequence[StateEntry],
    missing: Sequence[str],
    stored: Mapping[str, HubTensor],
    new: Mapping[str, float],
) -> str:
    """Return an error's advice: a call that loads the checkpoint despite the missing tensors, or an empty text."""
    names = [entry.names[0] for entry in entries]
    inner = _inner_models(model)
    prefix = next((path for path in inner if _fills(model, path, entries, missing, stored)), "")
    if prefix and len(inner) > 1:
        calls = ", ".join(f"load_weights(model.{path}, checkpoint)" for path in inner)
        return f"\nthe checkpoint is of the module {prefix!r} of this model: load each model alone, {calls}"
    if prefix:
        missing = [name for name in names if not name.startswith(f"{prefix}.")]
    elif 2 * len(missing) > len(names):
        return _around_checkpoint(missing, stored)
    heads = dict.fromkeys(_missing_module(name, names, missing) for name in missing)
    if any(part.isdigit() for head in heads for part in head.split(".")) or "" in heads:
        return ""  # a part of a block: the checkpoint is incomplete
    std = getattr(getattr(submodule(model, "prefix", prefix), "config", None), "initializer_range", _DEVIATION)
    drawn = {**new, **dict.fromkeys(heads, std)}
    if not missing and not prefix:
        return ""
    arguments = ", ".join([f"prefix={prefix!r}"] * bool(prefix) + [f"new_modules={drawn!r}"] * bool(drawn))
    of = f"the checkpoint is of the module {prefix!r} of this model" if prefix else "the checkpoint lacks these modules"
    return f"\n{of}: write load_weights(model, checkpoint, {arguments}); values of new modules are drawn"


def _inner_models(model: nn.Module) -> list[str]:
    """Return the paths of a module's outermost transformers submodules."""
    paths: list[str] = []
    for path, module in model.named_modules():
        if path and is_transformers_model(module) and not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    return paths


def _fills(
    model: nn.Module,
    prefix: str,
    entries: Sequence[StateEntry],
    missing: Sequence[str],
    stored: Mapping[str, HubTensor],
) -> bool:
    """Return whether all tensors of the module at ``prefix`` are missing without the prefix and stored with it."""
    inside = [entry for entry in entries if any(name.startswith(f"{prefix}.") for name in entry.names)]
    if not inside or not {entry.names[0] for entry in inside} <= {*missing}:
        return False
    weights = map_weights(model, entries, stored, prefix)
    return all(weights.name_of(entry) is not None for entry in inside)


def _missing_module(name: str, names: Sequence[str], missing: Sequence[str]) -> str:
    """Return the outermost module around a tensor with all tensors missing, or else the tensor's module."""
    path = name.rpartition(".")[0]
    lacking = {*missing}
    while (outer := path.rpartition(".")[0]) and all(n in lacking for n in names if n.startswith(f"{outer}.")):
        path = outer
    return path


def _around_checkpoint(missing: Sequence[str], stored: Mapping[str, HubTensor]) -> str:
    """Return an error's advice if the checkpoint stores all missing tensors under a prefix, or an empty text."""
    ends = (name.removesuffix(missing[0]) for name in stored if name.endswith(f".{missing[0]}"))
    prefix = next((start for start in ends if all(f"{start}{name}" in stored for name in missing)), "")
    if not prefix:
        return ""
    return (
        f"\nthe checkpoint has these tensors below {prefix!r}: it was saved from a module around this model. Save the "
        f"inner model with save_weights(module.{prefix.removesuffix('.')}, directory), and load that"
    )
