"""Saving a sharded model as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdp_runtime import _transformers_compat as transformers_compat
from fsdp_runtime._peft_compat import base_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded.collectives import Ranks, all_or_none, ranks_of, ranks_of_world
from fsdp_runtime.sharded.fsync import sync, write_synced
from fsdp_runtime.sharded.safetensors_io import Planned, SafetensorsFile
from fsdp_runtime.weights.export import Outgoing, outgoing_units
from fsdp_runtime.weights.hub_checkpoint import INDEX_FILE, SINGLE_FILE
from fsdp_runtime.weights.naming import Names
from fsdp_runtime.weights.stream import buckets, gathered

_WORK = ".saving-"
_SHARD = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")


def save_weights(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    bucket_bytes: int = 256 * 2**20,
    dtype: torch.dtype | None = None,
    names: Names = "checkpoint",
) -> None:
    """Save a model as safetensors, with ``config.json`` and ``generation_config.json`` where it has them.

    Collective: over the ranks of the model's mesh; for a model of plain tensors over the whole world.  The first
    rank writes; none holds more than one bucket of full tensors.  Files are written aside and then renamed.  What
    is in the directory stays valid until one last rename puts the new weights in force, so a process killed at
    any moment leaves the old or the new ones whole; the config is renamed just before.

    Args:
        model: plain, split over ``tp``, sharded by FSDP2, or both.
        directory: made if it is not there; files that are no weights, as a tokenizer's, stay.
        max_shard_bytes: begin another file beyond this; a larger tensor has a file of its own.
        bucket_bytes: see :func:`stream_weights`.
        dtype: see :func:`stream_weights`; also what the config says.
        names: see :func:`stream_weights`.

    Raises:
        ConversionError: see :func:`stream_weights`.
        WeightsError: a dtype that safetensors does not have.
        OSError: on the first rank, when it cannot write; the directory's old contents are in force then.
        OtherRankError: on the other ranks, when the first rank failed.
    """
    if max_shard_bytes < 1 or bucket_bytes < 1:
        raise OptionError(f"max_shard_bytes={max_shard_bytes}, bucket_bytes={bucket_bytes}: give positive numbers")
    ranks = ranks_of(model)
    if not ranks.groups:
        ranks = ranks_of_world()
    target = Path(directory)
    with all_or_none(ranks):
        units = outgoing_units(model, dtype=dtype, names=names)
        items = [item for unit in units for item in unit.outgoing]
        saved_dtype = next((item.dtype for item in items if item.dtype.is_floating_point), torch.get_default_dtype())
        shards = list(buckets(items, max_shard_bytes))
    with _work_directory(target, ranks) as work:
        _write_shards(shards, gathered(units, bucket_bytes, dtype=dtype), work, ranks)
        with all_or_none(ranks):
            if work is not None:
                if transformers_compat.is_transformers_model(base_model(model)):
                    transformers_compat.save_config(base_model(model), work, saved_dtype)
                _put_in_force(work, target, shards)


@contextmanager
def _work_directory(target: Path, ranks: Ranks) -> Iterator[Path | None]:
    """Where the first rank writes, ``None`` on the others; on the same file system, so that files can be renamed."""
    work = target / f"{_WORK}{uuid.uuid4().hex[:8]}" if ranks.is_first else None
    try:
        with all_or_none(ranks):
            if work is not None:
                for left_over in target.glob(f"{_WORK}*"):
                    shutil.rmtree(left_over)
                work.mkdir(parents=True)
        yield work
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


@torch.no_grad()
def _write_shards(
    shards: list[list[Outgoing]], stream: Iterator[tuple[Outgoing, Tensor]], work: Path | None, ranks: Ranks
) -> None:
    """Every rank gathers, the first one writes; a failure to write is known to all at the file's end at the latest."""
    for number, items in enumerate(shards, start=1):
        path = work / _shard_name(number, len(shards)) if work is not None else None
        with all_or_none(ranks):
            own = islice(stream, len(items))
            try:
                if path is not None:
                    with SafetensorsFile(path, [Planned(i.name, i.shape, i.dtype, i.nbytes) for i in items]) as file:
                        for item, tensor in own:
                            file.write(item.name, tensor)
            finally:
                for _ in own:  # the other ranks' part; and the first one's after a failure, so that none is stranded
                    pass


def _put_in_force(work: Path, target: Path, shards: list[list[Outgoing]]) -> None:
    """Move the files of a complete checkpoint into the directory, the one that decides which weights count last."""
    decisive = SINGLE_FILE if len(shards) == 1 else INDEX_FILE
    placed = {SINGLE_FILE}
    if decisive == INDEX_FILE:
        weight_map, placed = _place_shards(work, target, shards)
        _write_index(work / INDEX_FILE, weight_map, sum(item.nbytes for items in shards for item in items))
    for file in work.iterdir():
        if file.name != decisive:
            sync(file)
            file.replace(target / file.name)
    (work / decisive).replace(target / decisive)
    if decisive == INDEX_FILE:
        (target / SINGLE_FILE).unlink(missing_ok=True)  # readers prefer it to an index
    sync(target)
    for file in target.iterdir():
        if file.name not in placed and _SHARD.fullmatch(file.name):
            file.unlink()
    if decisive == SINGLE_FILE:
        (target / INDEX_FILE).unlink(missing_ok=True)


def _place_shards(work: Path, target: Path, shards: list[list[Outgoing]]) -> tuple[dict[str, str], set[str]]:
    """Move shards next to those in force, under names of their own; which file holds what, and the names."""
    usual = [_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    mark = f"model-{uuid.uuid4().hex[:8]}" if any((target / name).exists() for name in usual) else "model"
    weight_map = {}
    for name, items in zip(usual, shards, strict=True):
        final = name.replace("model", mark, 1)
        (work / name).replace(target / final)
        weight_map.update({item.name: final for item in items})
    return weight_map, set(weight_map.values())


def _write_index(path: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_synced(path, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def _shard_name(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
