"""Save a sharded model as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._transformers_compat.checkpoints import save_config
from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.sharded.collectives import ModelRanks, mesh_or_world_ranks, raise_on_all, require_equal_on_all
from fsdp_runtime.sharded.fsync import fsync_path, move_into_place, write_and_fsync
from fsdp_runtime.sharded.paths import require_path
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter, TensorHeader
from fsdp_runtime.sharded.work_directory import others_at_work, work_directory
from fsdp_runtime.sync.quantize.formats import Quantization
from fsdp_runtime.weights.export import ExportedTensor
from fsdp_runtime.weights.hub_checkpoint import INDEX_FILE, SINGLE_FILE
from fsdp_runtime.weights.naming import Names
from fsdp_runtime.weights.stream import DEFAULT_BUCKET_BYTES, WeightExport, split_by_bytes

_SHARD_FILE = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")


def save_weights(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    names: Names = "checkpoint",
    quantize: Quantization | None = None,
) -> None:
    """Save a model as safetensors, with its ``config.json`` and ``generation_config.json``, if it has them.

    Collective: over the ranks of the model's mesh; for a model of plain tensors over the world.  The first rank writes;
    no rank holds more than one bucket of full tensors.  Files are written to a temporary directory and then renamed.
    One last rename makes the new weights take effect, so a process killed at any time leaves either the old or the new
    weights complete; the config is renamed just before.  Of jobs that save to one directory at the same time, the last
    rename is in effect.

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        directory: the same on every rank; created if it does not exist; other files in it, such as a tokenizer's, are
            kept.
        max_shard_bytes: bytes of a file, as transformers' ``max_shard_size``; a larger tensor has a file of its own.
        bucket_bytes: gather parameters together up to this many bytes of full tensors.
        dtype: convert floating-point tensors to this dtype before they are communicated, and write it to the config;
            ``None`` keeps each one's.
        names: ``"checkpoint"`` for the names of the Hugging Face checkpoint, ``"model"`` for the model's own.
        quantize: store linear layers in low precision, with their scales, and say so in the config; other weights then
            default to bfloat16.

    Raises:
        ConversionError: the model's tensors differ from those of its class (``names="model"`` works), or are quantized.
        OptionError: a size is not positive, ``dtype`` not a floating-point dtype, ``names`` unknown, or the directory
            empty or not the same on every rank.
        WeightsError: safetensors lacks the dtype of a tensor.
        OSError: on the first rank, if it cannot write; the directory's old contents stay in effect.
        OtherRankError: on the other ranks, if the first rank failed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torch import nn
        >>> from fsdp_runtime import save_weights
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_weights(nn.Linear(2, 3), directory)
        ...     [file.name for file in Path(directory).iterdir()]
        ['model.safetensors']
    """
    if max_shard_bytes < 1 or bucket_bytes < 1:
        raise OptionError(f"max_shard_bytes={max_shard_bytes}, bucket_bytes={bucket_bytes}: give positive numbers")
    entries = state_entries(model)
    ranks = mesh_or_world_ranks(model, entries)
    with raise_on_all(ranks) as step:
        target = require_path("directory", directory)
        step.value = os.path.normpath(target)
        options = WeightExport(dtype=dtype, names=names, quantize=quantize, bucket_bytes=bucket_bytes)
        export = options.prepare(model, entries)
        items = export.tensors
        config_dtype = next((item.dtype for item in items if item.dtype.is_floating_point), torch.get_default_dtype())
        if quantize is not None:
            config_dtype = dtype or torch.bfloat16
        shards = list(split_by_bytes(items, max_shard_bytes))
    require_equal_on_all("directory", step.values)
    with work_directory(target, ranks) as work:
        _write_shards(shards, export.stream(), work, ranks)
        with raise_on_all(ranks):
            if ranks.is_first:
                if is_transformers_model(base_model(model)):
                    save_config(base_model(model), work, config_dtype)
                    if quantize is not None:
                        _add_to_config(work / "config.json", quantize.config(export.kept_modules))
                _commit(work, target, shards)


@torch.no_grad()
def _write_shards(
    shards: list[list[ExportedTensor]], stream: Iterator[tuple[str, Tensor]], work: Path, ranks: ModelRanks
) -> None:
    """Gather on every rank and write on the first; a write error reaches all ranks at the end of the file."""
    for number, items in enumerate(shards, start=1):
        with raise_on_all(ranks):
            tensors = islice(stream, len(items))
            try:
                if ranks.is_first:
                    path = work / _shard_name(number, len(shards))
                    headers = [TensorHeader(item.name, item.shape, item.dtype, item.nbytes) for item in items]
                    with SafetensorsWriter(path, headers) as file:
                        for name, tensor in tensors:
                            file.write(name, tensor)
            finally:
                # The other ranks only gather.  After a write error the first rank still joins the gathers.
                for _ in tensors:
                    pass


def _commit(work: Path, target: Path, shards: list[list[ExportedTensor]]) -> None:
    """Move the files of a complete checkpoint into the directory; the file that readers look for first comes last.

    Of several jobs that save to the directory, the last one to move that file is in effect.  An index stays where one
    is: if it could be removed for one file, and that file for an index, two jobs could leave neither.
    """
    indexed = len(shards) > 1 or (target / INDEX_FILE).exists()
    decisive = INDEX_FILE if indexed else SINGLE_FILE
    if indexed:
        weight_map = _place_shards(work, target, shards)
        _write_index(work / INDEX_FILE, weight_map, sum(item.nbytes for items in shards for item in items))
    else:
        (work / _shard_name(1, 1)).rename(work / SINGLE_FILE)
    for file in work.iterdir():
        if file.name != decisive:
            move_into_place(file, target / file.name)
    move_into_place(work / decisive, target / decisive)
    if indexed:
        (target / SINGLE_FILE).unlink(missing_ok=True)  # readers prefer it to an index
    fsync_path(target)
    _remove_old_shards(work, target)


def _remove_old_shards(work: Path, target: Path) -> None:
    """Remove the shards that the index lacks, unless another job is at work, whose index may not be in place yet."""
    shards = [file for file in target.iterdir() if _SHARD_FILE.fullmatch(file.name)]
    if not shards or others_at_work(work):
        return
    try:
        used = set(json.loads((target / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        used = set()
    for file in shards:
        if file.name not in used:
            file.unlink(missing_ok=True)


def _place_shards(work: Path, target: Path, shards: list[list[ExportedTensor]]) -> dict[str, str]:
    """Move shards next to the current ones under names that no file had before; return the weight map.

    The usual names are for the first checkpoint of a directory: another job could remove files of names used again.
    """
    usual = [_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    stem = "model" if _claims_usual_names(target, usual[0]) else f"model-{uuid.uuid4().hex[:8]}"
    weight_map = {}
    for name, items in zip(usual, shards, strict=True):
        final = name.replace("model", stem, 1)
        (work / name).replace(target / final)
        weight_map.update({item.name: final for item in items})
    return weight_map


def _claims_usual_names(target: Path, first: str) -> bool:
    """Return whether the directory has no checkpoint or part of one, and no other job creates its first file now."""
    if any(file.name in (SINGLE_FILE, INDEX_FILE) or _SHARD_FILE.fullmatch(file.name) for file in target.iterdir()):
        return False
    try:
        (target / first).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _add_to_config(path: Path, quantization: dict[str, Any]) -> None:
    config = {**json.loads(path.read_text()), "quantization_config": quantization}
    write_and_fsync(path, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _write_index(path: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_and_fsync(path, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"
