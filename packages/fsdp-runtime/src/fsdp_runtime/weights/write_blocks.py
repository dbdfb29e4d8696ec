"""Write a rank's areas of exported tensors into files that all ranks write to, and exchange parts of areas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_runtime.sharded.chunks import inside
from fsdp_runtime.sharded.collectives import ModelRanks, exchange_bytes
from fsdp_runtime.sharded.host_staging import StagedWriter
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter, file_runs
from fsdp_runtime.weights.export import ExportedTensor
from fsdp_runtime.weights.file_plan import Area, Part, WriteStep
from fsdp_runtime.weights.messages import EXCHANGED_BYTES, ReusedMemory, in_message, local_view, message_bytes
from tp_plans.transfer import Box, box_shape, split_box, volume

#: Bytes that are converted, or copied from a device, before they are written.
STAGED_BYTES = 2**24

#: A writer of blocks: at once, or from host memory later.
Writer = SafetensorsWriter | StagedWriter


@dataclass(frozen=True)
class SaveReport:
    """Bytes that one rank wrote, sent, received and held in :func:`save_weights`."""

    bytes_written: int = 0  # without the files' headers
    bytes_sent: int = 0
    bytes_received: int = 0
    peak_bytes: int = 0  # held at most besides the model's own tensors


@dataclass(frozen=True)
class _Pending:
    item: ExportedTensor
    area: Area
    local: Mapping[str, Tensor]
    file: Writer | None


class BlockWriter:
    """This rank's side of a save: direct writes of local areas, and exchanges for all other areas."""

    # A write error is kept, and the exchanges go on, so that no other rank waits for this rank.

    def __init__(self, rank: int, ranks: ModelRanks, bucket_bytes: int, device: torch.device) -> None:
        self._ranks, self._rank, self._bucket_bytes = ranks, rank, min(bucket_bytes, EXCHANGED_BYTES)
        self._sent_from, self._received_in, self._assembled = ReusedMemory(device), ReusedMemory(device), ReusedMemory()
        self._pending: list[_Pending] = []
        self._held = 0
        self._written = self._sent = self._received = self._peak = 0
        self.error: Exception | None = None

    @property
    def report(self) -> SaveReport:
        """The bytes of this rank so far."""
        return SaveReport(self._written, self._sent, self._received, self._peak)

    def raise_error(self) -> None:
        """Raise the kept write error, if any."""
        if self.error is not None:
            raise self.error

    def add(
        self, item: ExportedTensor, steps: Sequence[WriteStep], sources: Mapping[str, Tensor], file: Writer | None
    ) -> None:
        """Write a tensor's local areas, and add its other areas to the next exchange.  Collective."""
        local = {str(number): sources[chunk.source] for number, chunk in enumerate(item.chunks or ())}
        for step in steps:
            if step.held and self._held + step.held > self._bucket_bytes:
                self.flush()
            self._held += step.held
            for area in step.areas:
                if step.held == 0:
                    if area.file_rank == self._rank:
                        self._write_local(item, area, local, file)
                elif self._rank == area.file_rank or any(part.rank == self._rank for part in area.parts):
                    self._pending.append(_Pending(item, area, local, file))

    def flush(self) -> None:
        """Exchange and write the pending areas.  Collective."""
        pending, self._pending, self._held = self._pending, [], 0
        sizes_out: dict[int, int] = {}
        sizes_in: dict[int, int] = {}
        for each, part in _sent(pending):
            if self._rank in (part.rank, each.area.file_rank):
                sizes, peer = (sizes_out, each.area.file_rank) if part.rank == self._rank else (sizes_in, part.rank)
                sizes[peer] = sizes.get(peer, 0) + message_bytes(each.item, part.box)
        outgoing, incoming = self._sent_from.messages(sizes_out), self._received_in.messages(sizes_in)
        self._sent += sum(sizes_out.values())
        self._received += sum(sizes_in.values())
        assembled = (
            volume(each.area.box) * each.item.dtype.itemsize for each in pending if each.area.file_rank == self._rank
        )
        self._peak = max(self._peak, sum(sizes_out.values()) + sum(sizes_in.values()) + max(assembled, default=0))
        offsets = dict.fromkeys(outgoing, 0)
        for each, part in _sent(pending):
            if part.rank == self._rank:
                peer = each.area.file_rank
                in_message(outgoing[peer], offsets[peer], each.item, part.box).copy_(_view(each.local, part))
                offsets[peer] += message_bytes(each.item, part.box)
        exchange_bytes(self._ranks, outgoing, incoming)
        offsets = dict.fromkeys(incoming, 0)
        for each in pending:
            if each.area.file_rank != self._rank:
                continue
            received = []
            for part in each.area.parts:
                if part.rank != self._rank:
                    received.append(in_message(incoming[part.rank], offsets[part.rank], each.item, part.box))
                    offsets[part.rank] += message_bytes(each.item, part.box)
            self._write_assembled(each, received)

    def _write_local(self, item: ExportedTensor, area: Area, local: Mapping[str, Tensor], file: Writer | None) -> None:
        """Write a part of a local tensor, staged only if the values have to be converted or copied."""
        (part,) = area.parts
        full = _view(local, part)
        as_it_is = full.device.type == "cpu" and full.dtype == item.dtype and full.is_contiguous()
        limit = volume(area.box) if as_it_is else max(min(STAGED_BYTES, self._bucket_bytes) // item.dtype.itemsize, 1)
        for box in split_box(area.box, max(limit, 1)):
            values = _view(local, Part(box, part.rank, part.piece)).to(item.dtype)
            if not as_it_is:
                self._peak = max(self._peak, values.nbytes)
            self._write(item, box, values, file)

    def _write_assembled(self, each: _Pending, received: Sequence[Tensor]) -> None:
        """Assemble an area and write it; ``received`` are the parts of other ranks, in order."""
        if self.error is not None:
            return
        box, given = each.area.box, iter(received)
        nbytes = volume(box) * each.item.dtype.itemsize
        values = self._assembled.bytes_of(nbytes).view(each.item.dtype).view(box_shape(box))
        for part in each.area.parts:
            own = part.rank == self._rank
            values[inside(box, part.box)].copy_(_view(each.local, part) if own else next(given))
        self._write(each.item, box, values, each.file)

    def _write(self, item: ExportedTensor, box: Box, values: Tensor, file: Writer | None) -> None:
        if self.error is not None or file is None:
            return
        try:
            flat = values.contiguous().reshape(-1)
            for start, inner, length in file_runs(item.shape, box):
                self._written += file.write(item.name, flat[inner : inner + length], start)
        except Exception as error:  # noqa: BLE001  # raised on all ranks when the exchanges are done
            self.error = error


def _sent(pending: Sequence[_Pending]) -> Iterator[tuple[_Pending, Part]]:
    """The parts that go from one rank to another, in the same order on both ranks."""
    return ((each, part) for each in pending for part in each.area.parts if part.rank != each.area.file_rank)


def _view(local: Mapping[str, Tensor], part: Part) -> Tensor:
    return local_view(local[str(part.piece.chunk)], f"chunk {part.piece.chunk}", part)
