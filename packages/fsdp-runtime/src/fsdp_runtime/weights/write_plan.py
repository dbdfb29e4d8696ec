"""Plan the files of a save and the ranks that write their parts, for the save and for its description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby

import torch

from fsdp_runtime.sharded.chunks import identity_chunk
from fsdp_runtime.sharded.file_systems import FilePlace, by_host
from fsdp_runtime.weights.export import ExportedTensor, ExportGroup
from fsdp_runtime.weights.file_plan import ExportedPieces, FilePlanner, WriteStep
from fsdp_runtime.weights.messages import EXCHANGED_BYTES
from fsdp_runtime.weights.stream import ExportedModel, split_by_bytes


@dataclass(frozen=True)
class PlannedFile:
    """A file of the checkpoint, its tensors, and its only writing rank; ``None`` if all ranks write to the file."""

    name: str
    items: Sequence[ExportedTensor]
    writer: int | None


@dataclass(frozen=True)
class PlannedGroups:
    """Groups of a model's tensors for one gather, or one group that is written block by block without a gather."""

    groups: Sequence[ExportGroup]
    gathered: bool  # every rank gets their full tensors
    tensors: Sequence[tuple[ExportedTensor, Sequence[WriteStep]]]


def plan_files(
    export: ExportedModel, max_shard_bytes: int, places: Mapping[int, FilePlace], *, shared: bool
) -> list[PlannedFile]:
    """Return the files, in order; ``shared`` if all ranks may write to one file."""
    shards = list(split_by_bytes(export.tensors, max_shard_bytes))
    return [
        PlannedFile(shard_name(number, len(shards)), items, None if shared else writer)
        for number, (items, writer) in enumerate(zip(shards, cycle(by_host(places)), strict=False), start=1)
    ]


def plan_writes(
    export: ExportedModel, everyone: Sequence[int], bucket_bytes: int, files: Sequence[PlannedFile]
) -> Iterator[PlannedGroups]:
    """Yield the groups, equal on every rank; only quantized weights and computed conversion outputs are gathered."""
    planner = FilePlanner(everyone, min(bucket_bytes, EXCHANGED_BYTES) // 4)
    pieces_of, writers = ExportedPieces(everyone), (each.writer for each in files for _ in each.items)
    for gathered, run in groupby(export.groups, lambda group: not export.is_rearranged(group)):
        if not gathered:
            for group in run:
                steps = [
                    planner.plan(item, *pieces_of(item, group.sources), writer=next(writers)) for item in group.tensors
                ]
                yield PlannedGroups([group], False, list(zip(group.tensors, steps, strict=True)))
            continue
        for batch in split_by_bytes(list(run), bucket_bytes):
            planned = []
            for item in export.parts(batch):
                full = replace(item, chunks=[identity_chunk(item.name, item.shape)])
                whole = {item.name: torch.empty(item.shape, dtype=item.dtype, device="meta")}
                pieces = pieces_of(full, whole, gathered=True)
                planned.append((full, planner.plan(full, *pieces, writer=next(writers))))
            yield PlannedGroups(batch, True, planned)


def shard_name(number: int, count: int) -> str:
    """The usual name of a file of a checkpoint."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"
