"""Initialise LoRA adapters or load peft's files, shard by shard: the full model need not fit on a host."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import BASE, adapter_settings, base_model, lora_layers, places
from fsdp_runtime._torch_compat import offloads_to_cpu
from fsdp_runtime.errors import CheckpointError, MismatchError, OptionError
from fsdp_runtime.model.materialize import compute_device, materialize_parameter
from fsdp_runtime.model.state import StateEntry, reshard_all, state_entries
from fsdp_runtime.sharded.boxes import fill_from, fill_local, identity_chunk
from fsdp_runtime.sharded.collectives import raise_on_all
from fsdp_runtime.sharded.model_state import ModelState
from fsdp_runtime.sharded.saved_files import require_path
from fsdp_runtime.weights.adapters import adapter_tensors, saved_tensors
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint, open_on_all

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
#: LoRA settings that change an adapter's output and are invisible in its tensors.
_SCALING = (
    *("peft_type", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora", "fan_in_fan_out"),
    "trainable_token_indices",
)
#: All other settings: they do not change the output, or they show in the tensor names.
_NOT_COMPARED = {
    *("auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "modules_to_save", "peft_version", "revision", "target_modules", "task_type"),
}


def init_adapters(model: nn.Module, *, adapter: str = "default", seed: int = 0) -> None:
    """Fill a low-rank adapter with peft's random initial values, on this rank's shards.

    For a ``PeftModel`` built under ``meta_device``: call it after ``parallelize`` and before ``load_weights``, which
    reads the base model only.  Each tensor has a separate random generator, seeded by ``seed`` and the tensor's name,
    so the values do not depend on the mesh.

    Args:
        model: the ``PeftModel``, plain, split over ``tp``, sharded by FSDP2, or both; on the meta device or not.
        adapter: the adapter's name.
        seed: seed of the random values.

    Raises:
        OptionError: the model has no adapter of this name, or its ``init_lora_weights`` needs the base model's
            weights.

    Example:
        >>> import peft, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import fsdp_runtime
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
        >>> with fsdp_runtime.meta_device():
        ...     model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        ...     model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        >>> fsdp_runtime.init_adapters(model, seed=1)
        >>> bool(dict(model.named_parameters())[
        ...     "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"].any())
        False
    """
    entries = state_entries(model)
    tensors = adapter_tensors(model, entries, adapter)
    layers = list(lora_layers(base_model(model)))
    if odd := next((layer for layer in layers if layer.odd), None):
        raise OptionError(
            f"{odd.path} has adapters that are merged, or not plain LoRA on a linear layer or on stacked experts "
            f"({odd.odd}): unmerge them"
        )
    settings = adapter_settings(model, adapter)
    if (how := settings.get("init_lora_weights")) is None:
        raise OptionError(f"{adapter!r} is of type {settings['peft_type']}, not low-rank: call load_adapter")
    if how is False and any(name.endswith(".bias") for name in tensors):
        raise OptionError("init_lora_weights=False with lora_bias=True: use True or 'gaussian', or load_adapter")
    if how not in (True, False, "gaussian"):
        raise OptionError(
            f"init_lora_weights={how!r} is computed from the base model's full weights: use True, False or 'gaussian', "
            "or load_adapter"
        )
    _materialize(model, entries, tensors.values())
    reshard_all(model)
    experts = {layer.path: layer.number for layer in layers}
    for name, tensor in tensors.items():
        stacked = experts.get(name.removeprefix(f"{BASE}.").rpartition(".lora_")[0], 1)
        fill_from(tensor, _initial(name, tensor.shape, how, seed, stacked))


def load_adapter(model: nn.Module, directory: str | os.PathLike[str], *, adapter: str = "default") -> None:
    """Load an adapter that ``save_adapter`` or peft's ``save_pretrained`` wrote into a sharded model, in place.

    Each rank reads only its slices.  Collective over the model's mesh, or over the world for a model of plain tensors.
    An adapter on the meta device is materialised first; its base model may still be on meta.

    Args:
        model: the ``PeftModel``, plain, split over ``tp``, sharded by FSDP2, or both.
        directory: holds ``adapter_model.safetensors`` and ``adapter_config.json``.
        adapter: name of the model's adapter to fill.

    Raises:
        OptionError: the model lacks the adapter, the adapter is merged, or ``adapter`` differs between ranks.
        CheckpointError: a file is missing, truncated or corrupt, changes during the read, or differs between ranks.
        MismatchError: tensors are missing, unexpected or of another shape, or settings that scale the adapter differ;
            the error lists every difference.
        OtherRankError: another rank raised one of these errors.

    Errors are raised on every rank before a tensor changes.  Exception: a file that fails or changes during the read.

    Example:
        >>> import tempfile, peft
        >>> from torch import nn
        >>> from fsdp_runtime import load_adapter, save_adapter
        >>> base = nn.Sequential(nn.Linear(4, 4))
        >>> model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_adapter(model, directory)
        ...     load_adapter(model, directory)
    """
    state = ModelState(model)
    ranks = state.writers
    with raise_on_all(ranks) as step:
        folder = require_path("directory", directory)
        step.options = {"adapter": adapter}
        wrappers = (place for place in places(base_model(model)) if place.wrapper)
        if merged := next((place.path for place in wrappers if getattr(place.module, "merged", False)), None):
            raise OptionError(f"{merged} has adapters that are merged into its weight: unmerge them first")
        tensors = saved_tensors(model, state.whole, adapter, embeddings=False)
        with_embeddings = saved_tensors(model, state.whole, adapter, embeddings=True)
        saved = _saved_settings(folder)
    checkpoint = open_on_all(folder / _WEIGHTS, ranks)
    with checkpoint:
        with raise_on_all(ranks):
            tensors |= {name: tensor for name, tensor in with_embeddings.items() if name in checkpoint.tensors}
            problems = [*_scaling_problems(saved, adapter_settings(model, adapter)), *_problems(tensors, checkpoint)]
            if problems:
                listed = "\n  ".join(problems)
                raise MismatchError(f"the adapter in {folder} does not fit the model's {adapter!r}:\n  {listed}")
        absent = {id(entry.tensor) for entry in state.whole if entry.is_absent}
        tensors = {name: tensor for name, tensor in tensors.items() if id(tensor) not in absent}
        _materialize(model, state.entries, tensors.values())
        reshard_all(model)
        with raise_on_all(ranks):
            for name, tensor in tensors.items():
                fill_local(tensor, [identity_chunk(name, tensor.shape)], checkpoint.read)
            checkpoint.require_unchanged()


def _materialize(model: nn.Module, entries: Sequence[StateEntry], tensors: Iterable[Tensor]) -> None:
    device = torch.device("cpu") if offloads_to_cpu(model) else compute_device(model, entries)
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter) and tensor.is_meta:
            materialize_parameter(tensor, device)


def _initial(name: str, shape: Sequence[int], how: bool | str, seed: int, experts: int) -> Tensor:
    """The full initial value of a tensor, float32, as peft's ``LoraLayer.reset_lora_parameters`` draws it."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
    value = torch.zeros(*shape)  # the bias of lora_B stays zero
    is_a = ".lora_A." in name
    if how == "gaussian":
        return value.normal_(std=experts / shape[0], generator=generator) if is_a else value
    if is_a or how is False:
        return nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


def _saved_settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise TypeError(f"it holds a {type(settings).__name__}")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder / _CONFIG} is missing or not a config of peft ({error}): save it again"
        ) from error
    if not (folder / _WEIGHTS).is_file():
        raise CheckpointError(f"{folder} has no {_WEIGHTS}: only safetensors are read")
    return settings


def _scaling_problems(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    is_lora = settings["peft_type"] == "LORA"
    names = _SCALING if is_lora else [name for name in saved if name not in _NOT_COMPARED and "init" not in name]
    return [
        f"{name}={saved[name]!r} was saved, the model has {settings.get(name)!r}"
        for name in names
        if name in saved and _comparable(saved[name]) != _comparable(settings.get(name))
    ]


def _comparable(setting: Any) -> Any:
    """Return a setting in its JSON form; absent settings, empty settings and zeros are equal."""
    return (sorted(setting) if isinstance(setting, set) else setting) or None


def _problems(tensors: Mapping[str, Tensor], checkpoint: HubCheckpoint) -> list[str]:
    problems = [f"{name}: saved, and the model lacks it" for name in checkpoint.tensors if name not in tensors]
    for name, tensor in tensors.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            problems.append(f"{name}: missing; the model has shape {tuple(tensor.shape)}")
        elif stored.shape != tuple(tensor.shape):
            problems.append(f"{name}: shape {stored.shape} was saved, the model has {tuple(tensor.shape)}")
    return problems
