"""A check that all ranks were given the same model and the same options, before anything changes.

Ranks with different setups would wait for collectives that other ranks never call, or compute blocks of other sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from fsdp_runtime._transformers_compat.attention import attention_in_force
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.setup import Meshes
from fsdp_runtime.sharded.collectives import ModelRanks, all_gather_objects
from fsdp_runtime.sharded.initial_values import has_values
from fsdp_runtime.step import Step

_PACKAGES = ("torch", "transformers", "peft", "tp-plans", "fsdp-runtime")
#: Objects of these packages are described by their attributes, others by their classes.
_KNOWN = ("fsdp_runtime.", "tp_plans.")
#: Config entries that no forward reads: paths, display names, and entries that ``save_pretrained`` of transformers
#: and peft sets on the rank that wrote the files.
_UNREAD = (
    *("_name_or_path", "name_or_path", "base_model_name_or_path", "tokenizer_name_or_path", "_commit_hash", "revision"),
    *("architectures", "dtype", "torch_dtype", "transformers_version", "peft_version", "inference_mode"),
    *("auto_map", "auto_mapping", "_auto_class", "custom_pipelines", "transformers_weights"),
    *("id2label", "label2id", "finetuning_task", "task_specific_params", "tokenizer_class"),
)
#: A config entry that a forward with labels sets where it is ``None``.
_FILLED_IN = "problem_type"
#: The entry that says whether a rank's model has data.
_VALUES = "values"
#: Differences in a message, characters of a value, and characters before its first difference.
_SHOWN, _LENGTH, _LEAD = 4, 80, 40

#: The compared texts, by part and name.
Description = dict[str, dict[str, str]]


def require_same_setup(
    model: nn.Module, meshes: Meshes, steps: Iterable[Step[Any]]
) -> tuple[tuple[ProcessGroup, ...], bool]:
    """Raise on every rank of the meshes unless all ranks have the same model and options.

    Return the groups of the axes, which together connect all ranks, and whether a rank has a parameter with values.
    """
    # One all-gather of digests over the ranks of each axis, none for a single process or on a simulated mesh.
    groups = list(_groups(meshes.fsdp, meshes.cp, meshes.tp, meshes.ep, meshes.expert_fsdp, meshes.pp))
    if not groups:
        return (), False
    ranks = ModelRanks(groups)
    texts = _describe(model, meshes, steps)
    digests = {part: blake2b(json.dumps(lines).encode(), digest_size=8).hexdigest() for part, lines in texts.items()}
    by_rank = all_gather_objects(ranks, {**digests, _VALUES: has_values(model)})
    # Ranks of ``cp`` are part of FSDP2's, and ``ep`` divides the same ranks.
    disjoint = _groups(meshes.cp if meshes.fsdp is None else meshes.fsdp, meshes.tp, meshes.pp)
    connected = tuple(disjoint), any(digest[_VALUES] for digest in by_rank.values())
    differing = [part for part in texts if len({digest[part] for digest in by_rank.values()}) > 1]
    if not differing:
        return connected
    descriptions = all_gather_objects(ranks, {part: texts[part] for part in differing})
    lines = [line for part in differing for line in _differences(part, descriptions)]
    if not lines:
        return connected
    of_model = any(line.startswith(("model", "module", "parameter", "buffer", "config")) for line in lines)
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    raise (ModelError if of_model else OptionError)(
        f"ranks were given different {'models' if of_model else 'options'}: {'; '.join(lines[:_SHOWN])}{more}; give "
        "every rank the same model, options and versions"
    )


def _groups(*meshes: DeviceMesh | None) -> Iterator[ProcessGroup]:
    for mesh in meshes:
        for group in [] if mesh is None else mesh.get_all_groups():
            if dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake":
                yield group


def _differences(part: str, by_rank: Mapping[int, Description]) -> Iterator[str]:
    """Yield the differences of a part, each with the ranks of every value; or the first difference in the order."""
    texts = {rank: description[part] for rank, description in sorted(by_rank.items())}
    differs = False
    for name in dict.fromkeys(name for entries in texts.values() for name in entries):
        values = {rank: entries.get(name, "missing") for rank, entries in texts.items()}
        if len(set(values.values()) - ({"missing"} if name.endswith(_FILLED_IN) else set())) > 1:
            differs = True
            yield f"{part} {name}: {_ranks_by_value(values)}"
    if differs:
        return
    # Shards of parameters are gathered in this order. Buffers and entries of a config are described in sorted order.
    on_all = set.intersection(*map(set, texts.values()))
    orders = ([name for name in entries if name in on_all] for entries in texts.values())
    for place, names in enumerate(zip(*orders, strict=True)):
        if len(set(names)) > 1:
            yield f"{part}s in another order: number {place} is {_ranks_by_value(dict(zip(texts, names, strict=True)))}"
            return


def _ranks_by_value(values: Mapping[int, str]) -> str:
    """Return the values with their ranks; long values start shortly before their first difference."""
    ranks: dict[str, list[str]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(str(rank))
    same = next((place for place, letters in enumerate(zip(*ranks, strict=False)) if len(set(letters)) > 1), _LEAD)
    start = max(0, same - _LEAD) if max(map(len, ranks)) > _LENGTH else 0
    return ", ".join(
        f"{'...' * (start > 0)}{value[start : start + _LENGTH]} "
        f"on rank{'s' * (len(of) > 1)} {', '.join(of[:8])}{', ...' * (len(of) > 8)}"
        for value, of in ranks.items()
    )


def _describe(model: nn.Module, meshes: Meshes, steps: Iterable[Step[Any]]) -> Description:
    return {
        "version": {name: _version(name) for name in _PACKAGES},
        "axis": {f.name: _text(getattr(meshes, f.name)) for f in fields(meshes)},
        "option": dict(_options(steps)),
        "model": {"class": _class_name(type(model))},
        "config": dict(_config(model)),
        "module": {path or "model": _class_of(module) for path, module in model.named_modules()},
        "parameter": dict(_tensors(model.named_parameters(remove_duplicate=False))),
        # Rotary code may register a buffer per type of layer, in the order of a set.
        "buffer": dict(_tensors(sorted(model.named_buffers(remove_duplicate=False)))),
    }


@cache  # each lookup reads and parses a file
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _options(steps: Iterable[Step[Any]]) -> Iterator[tuple[str, str]]:
    """Yield the fields of this package's steps, and the classes of user steps: their fields may differ by rank."""
    for step in steps:
        name = type(step).__name__
        yield name, _class_name(type(step))
        own: Any = step
        if is_dataclass(own) and type(step).__module__.startswith(_KNOWN):
            for field in fields(own):
                yield f"{name}.{field.name}", _text(getattr(own, field.name))


def _config(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the entries of the config and of adapters' configs that a forward may read, in the order of their names."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        # Context parallelism appends an address to the name.
        yield "attn_implementation", re.sub("_[0-9a-f]{9,}$", "", str(attention_in_force(config)))
        yield from sorted(_flat("", config.to_dict()))
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, Mapping):
        for name, adapter in sorted(adapters.items()):
            yield from sorted(_flat(f"adapter {name}", vars(adapter)))


def _flat(path: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    # An entry that is ``None`` and a missing entry mean the same.
    for key, value in values.items():
        name = f"{path}.{key}" if path else str(key)
        if str(key) in _UNREAD or value is None:
            continue
        if isinstance(value, Mapping):
            yield from _flat(name, value)
        else:
            yield name, _text(value)


def _class_of(module: nn.Module) -> str:
    """Return a module's class, and the options of torch's modules, such as a probability of dropout."""
    cls = type(module)
    return f"{_class_name(cls)}({module.extra_repr() if cls.__module__.startswith('torch.nn.') else ''})"


def _tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Yield each tensor's dtype, shape, whether it is trained and has a gradient, and its first name if it is tied."""
    first: dict[int, str] = {}
    for name, tensor in named:
        tied = first.setdefault(id(tensor), name)
        text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        about = ("" if tensor.requires_grad else " frozen") + ("" if tensor.grad is None else " with a gradient")
        yield name, f"{text}{about}{'' if tied == name else f' tied to {tied}'}"


def _class_name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _text(value: Any) -> str:
    """Return a text that is equal in two processes for equal values."""
    if isinstance(value, str):
        return repr(str(getattr(value, "value", value)))  # peft's enums are equal to their words
    if value is None or isinstance(value, (bool, int, float, Enum, torch.dtype, torch.device, Placement)):
        return repr(value)
    if isinstance(value, DeviceMesh):
        return _text(tuple(value.shape))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(each)}' for key, each in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if hasattr(value, "__qualname__"):  # a class or a function
        return _class_name(value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, ParallelStyle) or type(value).__module__.startswith(_KNOWN):
        inside = getattr(value, "__dict__", {})
    else:
        inside = {}
    return f"{_class_name(type(value))}({', '.join(f'{name}={_text(each)}' for name, each in inside.items())})"
