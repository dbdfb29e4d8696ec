"""Bytes that a save, a load or a stream of weights moves per rank, counted from their plans in advance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.sharded.chunks import identity_chunk
from fsdp_runtime.sharded.collectives import model_mesh
from fsdp_runtime.sharded.safetensors_io import DTYPE_NAMES, SafetensorsLayout
from fsdp_runtime.weights.adapters import base_state_entries
from fsdp_runtime.weights.export import ExportedTensor, ExportGroup
from fsdp_runtime.weights.file_plan import WriteStep
from fsdp_runtime.weights.hub_checkpoint import HubTensor
from fsdp_runtime.weights.load import filled_in_blocks
from fsdp_runtime.weights.messages import EXCHANGED_BYTES, message_bytes
from fsdp_runtime.weights.naming import map_weights
from fsdp_runtime.weights.read_blocks import STAGED_BYTES, read_ahead
from fsdp_runtime.weights.read_plan import Read, plan_reads
from fsdp_runtime.weights.stream import ExportedModel, WeightExport, split_by_bytes
from fsdp_runtime.weights.write_plan import PlannedFile, plan_writes
from tp_plans.transfer import volume


@dataclass
class RankTraffic:
    """Bytes and messages of one rank.

    Args:
        read: bytes read from files.
        written: bytes written to files, without their headers.
        sent: bytes sent to other ranks.
        received: bytes received from other ranks.
        gathered: bytes of full tensors that all-gathers bring to the rank, beyond its own shards.
        held: the most bytes held at once, besides the model's own tensors.
        unneeded: bytes of ``read`` that no rank of the readers needs.  Gaps of up to 256 KiB between columns are read
            too, as one more read takes longer.
        messages: messages sent and received; an exchange sends one message from one rank to another.
    """

    read: int = 0
    written: int = 0
    sent: int = 0
    received: int = 0
    gathered: int = 0
    held: int = 0
    unneeded: int = 0
    messages: int = 0


#: Traffic by global rank.
ByRank = dict[int, RankTraffic]


def model_ranks(model: nn.Module) -> list[int]:
    """The ranks of a model's mesh, in order; only rank 0 for a model of plain tensors."""
    mesh = model_mesh(state_entries(model, allow_offloaded=True))
    return [0] if mesh is None else sorted(mesh.mesh.flatten().tolist())


def save_traffic(
    export: ExportedModel, files: Sequence[PlannedFile], everyone: Sequence[int], bucket_bytes: int
) -> ByRank:
    """Count the bytes of weights that :func:`~fsdp_runtime.save_weights` moves, also on the meta device."""
    limit = min(bucket_bytes, EXCHANGED_BYTES)
    counts = _Exchanges(everyone, limit)
    steps: dict[int, _StepBytes] = {}
    ends = {*accumulate(len(each.items) for each in files)}  # numbers of tensors after which a file is complete
    number = 0
    for planned in plan_writes(export, everyone, bucket_bytes, files):
        if planned.gathered:
            counts.gather(planned.groups, export)
        for item, own in planned.tensors:
            for step in own:
                if id(step) not in steps:
                    is_staged = _is_staged(item, planned.groups)
                    steps[id(step)] = _StepBytes(item, step, counts.positions, limit, is_staged=is_staged)
                counts.add(steps[id(step)])
            number += 1
            if number in ends:
                counts.flush()
    counts.flush()
    return counts.found()


def load_traffic(
    model: nn.Module, stored: Mapping[str, HubTensor], readers: Sequence[int], bucket_bytes: int, *, one_host: bool
) -> ByRank:
    """Count the bytes that :func:`~fsdp_runtime.load_weights` moves on ranks (of a host) that read for one another."""
    entries = base_state_entries(model, state_entries(model, allow_offloaded=True))
    weights = map_weights(base_model(model), entries, stored)
    in_blocks, others = filled_in_blocks(entries, weights)
    found = {rank: RankTraffic() for rank in readers}
    ahead = dict.fromkeys(readers, 0)
    for batch in plan_reads(in_blocks, stored, readers, min(bucket_bytes, EXCHANGED_BYTES), one_host=one_host):
        exchanged = dict.fromkeys(readers, 0)
        pairs: set[tuple[int, int]] = set()
        for each in batch:
            _count_read(each, found, exchanged, ahead, pairs)
        for rank in chain(*pairs):
            found[rank].messages += 1
        for rank, nbytes in exchanged.items():
            found[rank].held = max(found[rank].held, nbytes)
    for rank, nbytes in ahead.items():
        found[rank].held += min(nbytes, read_ahead(bucket_bytes)) + STAGED_BYTES
    for _, name in others:
        origin = weights.by_model_name[name]
        sources = origin.conversion.sources if origin.conversion is not None else origin.stored
        whole = sum(prod(stored[name].shape) * stored[name].torch_dtype.itemsize for name in sources)
        for own in found.values():
            own.read += whole
            own.held = max(own.held, 2 * whole)
    return found


def stream_traffic(export: ExportedModel, options: WeightExport, ranks: Sequence[int]) -> ByRank:
    """Count the bytes that a stream gathers: every rank gets every tensor."""
    counts = _Exchanges(ranks, options.bucket_bytes)
    counts.gather(export.groups, export)
    sizes = [sum(group.nbytes for group in run) for run in split_by_bytes(export.groups, options.bucket_bytes)]
    at_once = 1 + options.buckets_ahead
    held = max((sum(sizes[first : first + at_once]) for first in range(len(sizes))), default=0)
    return {rank: replace(each, held=held) for rank, each in counts.found().items()}


def saved_tensors(files: Iterable[PlannedFile]) -> dict[str, HubTensor]:
    """The tensors of the checkpoint that a save writes."""
    found: dict[str, HubTensor] = {}
    for each in files:
        layout = SafetensorsLayout(each.items)
        for item in each.items:
            found[item.name] = HubTensor(Path(each.name), item.shape, DTYPE_NAMES[item.dtype], layout.offset(item.name))
    return found


class _StepBytes:
    """Bytes of each rank in a step; ``positions`` maps ranks to their places in the counts."""

    def __init__(
        self, item: ExportedTensor, step: WriteStep, positions: Mapping[int, int], limit: int, *, is_staged: bool
    ) -> None:
        self.step = step  # also keeps its id
        pairs: set[int] = set()
        found: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])  # written, sent, received, assembled
        for area in step.areas:
            nbytes, own = volume(area.box) * item.dtype.itemsize, found[area.file_rank]
            own[0] += nbytes
            if step.held or is_staged:
                own[3] = max(own[3], nbytes if step.held else min(nbytes, STAGED_BYTES, limit))
            for part in area.parts:
                if part.rank != area.file_rank:
                    message = message_bytes(item, part.box)
                    found[part.rank][1] += message
                    own[2] += message
                    pairs.add(positions[part.rank] * len(positions) + positions[area.file_rank])
        self.positions = _integers([positions[rank] for rank in found])
        counts = _integers(list(found.values())).T
        self.moved, self.exchanged, self.assembled = counts[:3], counts[1] + counts[2], counts[3]
        self.pairs = _integers(list(pairs))  # sender and receiver as one number
        self.is_held = bool(counts[1:].any())


class _Exchanges:
    """Sums of steps, exchange by exchange, as :class:`~fsdp_runtime.weights.write_blocks.BlockWriter` runs them."""

    def __init__(self, ranks: Sequence[int], limit: int) -> None:
        self.positions = {rank: position for position, rank in enumerate(ranks)}
        zeros = _integers([[0] * len(ranks)] * 7)
        self._moved, (self._exchanged, self._assembled, self._most, self._messages) = zeros[:3], zeros[3:]
        self._pairs: list[Tensor] = []
        self._limit, self._held = limit, 0
        self._gathered = self._gathered_at_once = 0

    def add(self, each: _StepBytes) -> None:
        """Add a step to the next exchange, or count its direct writes."""
        if each.step.held and self._held + each.step.held > self._limit:
            self.flush()
        self._held += each.step.held
        self._moved.index_add_(1, each.positions, each.moved)
        if each.is_held:
            self._exchanged.index_add_(0, each.positions, each.exchanged)
            self._pairs.append(each.pairs)
            assembled = torch.maximum(self._assembled[each.positions], each.assembled)
            self._assembled[each.positions] = assembled

    def flush(self) -> None:
        """Count the bytes that ranks hold in an exchange, and its messages."""
        self._held = 0
        torch.maximum(self._most, self._exchanged + self._assembled, out=self._most)
        self._exchanged.zero_()
        self._assembled.zero_()
        if self._pairs:
            found, count = torch.unique(torch.cat(self._pairs)), len(self.positions)
            for side in (found // count, found % count):
                self._messages += side.bincount(minlength=count)
            self._pairs = []

    def gather(self, groups: Iterable[ExportGroup], export: ExportedModel) -> None:
        """Count the full tensors that every rank gets."""
        whole = 0
        for group in groups:
            for tensor, dtype in zip(group.sources.values(), export.gathered_dtypes(group), strict=True):
                whole += tensor.numel() * dtype.itemsize
                self._gathered += (tensor.numel() - local_tensor(tensor).numel()) * dtype.itemsize
        self._gathered_at_once = max(self._gathered_at_once, whole)

    def found(self) -> ByRank:
        """The bytes that each rank moves, and the most that it holds."""
        most = self._most.clamp(min=self._gathered_at_once).tolist()
        return {
            rank: RankTraffic(0, written, sent, received, self._gathered, held, 0, messages)
            for rank, written, sent, received, held, messages in zip(
                self.positions, *self._moved.tolist(), most, self._messages.tolist(), strict=True
            )
        }


def _integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _count_read(
    each: Read, found: ByRank, exchanged: dict[int, int], ahead: dict[int, int], pairs: set[tuple[int, int]]
) -> None:
    reader = each.area.file_rank
    found[reader].read += each.nbytes
    found[reader].unneeded += each.nbytes - sum(volume(part.box) for part in each.area.parts) * each.item.dtype.itemsize
    for part in each.area.parts:
        for rank in each.receivers(part):
            nbytes = message_bytes(each.item, part.box)
            pairs.add((reader, rank))
            found[reader].sent += nbytes
            found[rank].received += nbytes
            exchanged[reader] += nbytes
            exchanged[rank] += nbytes
    if each.is_sent:
        ahead[reader] += each.nbytes


def _is_staged(item: ExportedTensor, groups: Sequence[ExportGroup]) -> bool:
    """Whether values are converted, copied from a device, or made contiguous before they are written."""
    for chunk in item.chunks or ():
        source: Tensor | None = next((g.sources[chunk.source] for g in groups if chunk.source in g.sources), None)
        if source is None or source.dtype != item.dtype or source.device.type != "cpu":
            return True
        if chunk != identity_chunk(chunk.source, item.shape):
            return True
    return False
