"""Handing weights to an inference engine: descriptions first, then buckets, by call or by broadcast.

vLLM's ``load_weights`` takes lists of names and tensors; engines that are other processes get names, dtypes and shapes
by their own channel, allocate, and take part in a broadcast: of one tensor after another, or of a whole bucket as one
run of bytes (SGLang's ``flattened_bucket``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_runtime.weights.export import outgoing_units
from fsdp_runtime.weights.naming import Names
from fsdp_runtime.weights.stream import buckets, gathered, require_bucket_bytes

Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class WeightInfo:
    """What a receiver must know of a weight to allocate it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def describe_weights(
    model: nn.Module, *, dtype: torch.dtype | None = None, names: Names = "checkpoint"
) -> list[WeightInfo]:
    """What :func:`stream_weights` will give with these arguments, in its order; no communication."""
    units = outgoing_units(model, dtype=dtype, names=names)
    return [WeightInfo(item.name, item.dtype, item.shape) for unit in units for item in unit.outgoing]


@torch.no_grad()
def stream_buckets(
    model: nn.Module,
    *,
    bucket_bytes: int = 256 * 2**20,
    dtype: torch.dtype | None = None,
    names: Names = "checkpoint",
) -> Iterator[Bucket]:
    """The weights of :func:`stream_weights` in lists, each of one dtype and up to ``bucket_bytes``, or one weight.

    For receivers in this process: ``for bucket in stream_buckets(model): engine.load_weights(bucket)``.  Drop a
    bucket before asking for the next.
    """
    require_bucket_bytes(bucket_bytes)
    units = outgoing_units(model, dtype=dtype, names=names)
    for together in buckets(units, bucket_bytes):  # so that no bucket waits while the next one is gathered
        bucket: Bucket = []
        size = 0
        for item, tensor in gathered(together, bucket_bytes, dtype=dtype):
            if bucket and (size + tensor.nbytes > bucket_bytes or tensor.dtype != bucket[0][1].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append((item.name, tensor))
            size += tensor.nbytes
            del tensor
        yield bucket


def send_weights(
    model: nn.Module,
    group: ProcessGroup | None,
    announce: Callable[[list[WeightInfo]], object],
    *,
    bucket_bytes: int = 256 * 2**20,
    dtype: torch.dtype | None = None,
    names: Names = "checkpoint",
    flat: bool = True,
) -> None:
    """Broadcast every weight to receivers in other processes, a bucket at a time.

    Collective over the model's ranks; one of them sends, and the others only gather.

    Args:
        model: see :func:`stream_weights`.
        group: on the rank that sends, a group of it and the receivers; ``None`` on the model's other ranks.
        announce: called on the sending rank before each bucket is broadcast, so that the receivers know what comes
            and join; must not wait until they have received.
        bucket_bytes: see :func:`stream_weights`; the peak is about twice this, with ``flat``.
        dtype: see :func:`stream_weights`.
        names: see :func:`stream_weights`.
        flat: broadcast a bucket as one run of bytes, which :func:`unpacked` takes apart; else tensor by tensor.
    """
    for bucket in stream_buckets(model, bucket_bytes=bucket_bytes, dtype=dtype, names=names):
        if group is None:
            continue
        announce([WeightInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket])
        own = dist.get_rank(group)
        for tensor in [packed(bucket)] if flat else [tensor for _, tensor in bucket]:
            dist.broadcast(tensor, group=group, group_src=own)


def packed(bucket: Bucket) -> Tensor:
    """A bucket as one run of bytes, tensor after tensor without gaps: ``[bytes]``, uint8."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])


def unpacked(weights: Sequence[WeightInfo], flat: Tensor) -> Bucket:
    """The inverse of :func:`packed`: names and tensors that are views of ``flat``.

    Args:
        weights: what was announced.
        flat: ``[bytes]``, uint8.
    """
    bucket, start = [], 0
    for weight in weights:
        tensor = flat[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
        bucket.append((weight.name, tensor))
        start += weight.nbytes
    return bucket
