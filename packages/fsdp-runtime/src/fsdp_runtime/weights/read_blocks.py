"""Read a rank's areas of a checkpoint's files ahead, in a thread, and exchange areas between ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fsdp_runtime.sharded.chunks import inside
from fsdp_runtime.sharded.collectives import ModelRanks, exchange_bytes
from fsdp_runtime.sharded.safetensors_io import file_runs
from fsdp_runtime.weights.file_plan import Part
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint
from fsdp_runtime.weights.messages import EXCHANGED_BYTES, ReusedMemory, in_message, local_view, message_bytes
from fsdp_runtime.weights.read_plan import Read
from tp_plans.transfer import box_shape, split_box

logger = logging.getLogger(__name__)

#: Bytes that are read before they are converted, or copied to a device.
STAGED_BYTES = 2**24
#: Seconds between two lines about the progress of a load.
_SAID_EVERY = 10.0


def read_ahead(bucket_bytes: int) -> int:
    """The most bytes that a rank reads ahead for other ranks."""
    return min(bucket_bytes, 2 * EXCHANGED_BYTES)


class BlockReader:
    """This rank's side of a load: its reads, and the parts that it sends to other ranks and receives."""

    # A read error is kept, and the exchanges go on, so that no other rank waits for this rank. ``bucket_bytes`` bounds
    # the bytes that are read ahead for other ranks.

    def __init__(
        self, rank: int, ranks: ModelRanks, bucket_bytes: int, device: torch.device, checkpoint: HubCheckpoint
    ) -> None:
        self._rank, self._ranks, self._device, self._checkpoint = rank, ranks, device, checkpoint
        self._ahead = _Budget(read_ahead(bucket_bytes))
        self._packed, self._received_in = ReusedMemory(), ReusedMemory(device)
        self._begin = self._said = time.monotonic()
        self._total = self._read = 0
        self._stopped = False
        self.bytes_sent = self.bytes_received = 0
        self.error: Exception | None = None

    def run(self, batches: Sequence[Sequence[Read]]) -> None:
        """Read, exchange and fill all batches.  Collective over the ranks that read for one another."""
        own = [[each for each in batch if self._rank in each.readers] for batch in batches]
        self._total = sum(each.nbytes for batch in own for each in batch)
        with ThreadPoolExecutor(1, "read") as pool:
            ahead = [{id(each): pool.submit(self._read_area, each) for each in batch} for batch in own]
            try:
                for batch, futures in zip(batches, ahead, strict=True):
                    self._exchange(batch, futures)
            except BaseException:
                self._stopped = True
                self._ahead.give_up()
                raise

    def raise_error(self) -> None:
        """Raise the kept read error, if any."""
        if self.error is not None:
            raise self.error

    def _read_area(self, each: Read) -> Tensor | None:
        """Read an area and fill this rank's parts; return the values if other ranks need parts."""
        if self._stopped:
            return None
        sent = each.is_sent
        if not sent and each.area.is_whole:
            self._fill_from_file(each)
            return None
        if sent:
            self._ahead.take(each.nbytes)
        values = torch.empty(box_shape(each.area.box), dtype=each.item.dtype)
        self._fill_buffer(each, each.area.box, values)
        for part in each.area.parts:
            if self._rank in part.piece.owners:
                _view(each, part).copy_(values[inside(each.area.box, part.box)])
        return values if sent else None

    def _fill_from_file(self, each: Read) -> None:
        """Read an area into its local tensor, through a buffer if the values have to be converted."""
        (part,) = each.area.parts
        full = _view(each, part)
        if full.device.type == "cpu" and full.dtype == each.item.dtype and full.is_contiguous():
            self._fill_buffer(each, part.box, full)
            return
        for box in split_box(part.box, max(STAGED_BYTES // each.item.dtype.itemsize, 1)):
            values = torch.empty(box_shape(box), dtype=each.item.dtype)
            self._fill_buffer(each, box, values)
            _view(each, Part(box, part.rank, part.piece)).copy_(values)

    def _fill_buffer(self, each: Read, box: tuple[tuple[int, int], ...], values: Tensor) -> None:
        flat = values.reshape(-1)
        for start, inner, length in file_runs(each.item.shape, box):
            self._checkpoint.read_into(each.stored, start, flat[inner : inner + length])
        self._read += values.nbytes
        if each.area.file_rank == self._rank:  # one of several readers: the page cache serves the others
            self._checkpoint.bytes_read += values.nbytes
        self._say()

    def _say(self) -> None:
        now = time.monotonic()
        if self._ranks.is_first and now - self._said > _SAID_EVERY:
            self._said, gib = now, 2**30
            rate = self._read / gib / (now - self._begin)
            logger.info("read %.1f of %.1f GiB, %.2f GiB/s on this rank", self._read / gib, self._total / gib, rate)

    def _exchange(self, batch: Sequence[Read], futures: dict[int, Future[Tensor | None]]) -> None:
        """Send this rank's reads of a batch, and fill parts from other ranks' reads."""
        own = [each for each in batch if id(each) in futures]
        sizes_out: dict[int, int] = {}
        sizes_in: dict[int, int] = {}
        for each, part, receiver in _sent(own):
            sizes_out[receiver] = sizes_out.get(receiver, 0) + message_bytes(each.item, part.box)
        for each, part in self._received(batch):
            sizes_in[each.area.file_rank] = sizes_in.get(each.area.file_rank, 0) + message_bytes(each.item, part.box)
        packed = self._packed.messages(sizes_out)
        offsets = dict.fromkeys(packed, 0)
        for each in own:
            values = self._result(each, futures.pop(id(each)))
            for _, part, receiver in _sent([each]):
                if values is not None:
                    given = in_message(packed[receiver], offsets[receiver], each.item, part.box)
                    given.copy_(values[inside(each.area.box, part.box)])
                offsets[receiver] += message_bytes(each.item, part.box)
            del values
        messages = {rank: message.to(self._device) for rank, message in packed.items()}
        incoming = self._received_in.messages(sizes_in)
        self.bytes_sent += sum(sizes_out.values())
        self.bytes_received += sum(sizes_in.values())
        exchange_bytes(self._ranks, messages, incoming)
        offsets = dict.fromkeys(incoming, 0)
        for each, part in self._received(batch):
            source = each.area.file_rank
            _view(each, part).copy_(in_message(incoming[source], offsets[source], each.item, part.box))
            offsets[source] += message_bytes(each.item, part.box)
        self._ahead.give(sum(each.nbytes for each in own if each.is_sent))

    def _received(self, batch: Sequence[Read]) -> Iterator[tuple[Read, Part]]:
        for each in batch:
            if self._rank not in each.readers:
                yield from ((each, part) for part in each.area.parts if self._rank in part.piece.owners)

    def _result(self, each: Read, future: Future[Tensor | None]) -> Tensor | None:
        try:
            return future.result()
        except Exception as error:  # noqa: BLE001  # raised on all ranks when the exchanges are done
            self.error = self.error or error
            return None


class _Budget:
    """Bytes that a thread may hold; the thread waits while the sum is too large, unless it holds no bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held, self._changed = limit, 0, threading.Condition()

    def take(self, nbytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._held == 0 or self._held + nbytes <= self._limit)
            self._held += nbytes

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._held -= nbytes
            self._changed.notify()

    def give_up(self) -> None:
        with self._changed:
            self._limit = 2**63
            self._changed.notify()


def _sent(reads: Sequence[Read]) -> Iterator[tuple[Read, Part, int]]:
    """The parts that leave the reader, with the receiving ranks, in the same order on all of these ranks."""
    return ((each, part, rank) for each in reads for part in each.area.parts for rank in each.receivers(part))


def _view(each: Read, part: Part) -> Tensor:
    return local_view(each.local[part.piece.chunk], each.item.name, part)
