"""Full weights out of a sharded model, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.weights.export import Outgoing, Unit, outgoing_units
from fsdp_runtime.weights.naming import Names

_T = TypeVar("_T", Unit, Outgoing)


@torch.no_grad()
def stream_weights(
    model: nn.Module,
    *,
    bucket_bytes: int = 256 * 2**20,
    dtype: torch.dtype | None = None,
    names: Names = "checkpoint",
) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a model as a full plain tensor, on every rank, in model order.

    Collective: every rank has to exhaust the iterator.  A tied weight comes once, under the name that
    ``save_pretrained`` gives it.  Parameters are read as the optimizer sees them, also while ``unsharded`` holds
    copies in another dtype.

    Args:
        model: plain, split over ``tp``, sharded by FSDP2, or both.
        bucket_bytes: gather parameters together up to this many bytes of full tensors; at least one parameter is.
            The peak is about this and the largest parameter, and the buffers of one more axis under TP x FSDP2.
        dtype: convert floating-point tensors to this before they are communicated; ``None`` keeps each one's.
        names: ``"checkpoint"`` for the names of the Hugging Face checkpoint, ``"model"`` for the model's own.

    Yields:
        Name and tensor, on the device that the model computes on.  A tensor that no axis cuts is the model's own
        storage, and several that the checkpoint keeps apart may share theirs, so do not write to them; to bound
        memory, drop each tensor before asking for the next.

    Raises:
        ConversionError: the model's tensors are not those that its class says; ``names="model"`` works.
    """
    require_bucket_bytes(bucket_bytes)
    for item, tensor in gathered(outgoing_units(model, dtype=dtype, names=names), bucket_bytes, dtype=dtype):
        yield item.name, tensor


def require_bucket_bytes(bucket_bytes: int) -> None:
    """Raise :class:`OptionError` unless a bucket can hold anything."""
    if bucket_bytes < 1:
        raise OptionError(f"bucket_bytes={bucket_bytes}: give a positive number of bytes")


def gathered(
    units: Sequence[Unit], bucket_bytes: int, *, dtype: torch.dtype | None
) -> Iterator[tuple[Outgoing, Tensor]]:
    """Everything that leaves, with its full tensor, gathered a bucket at a time; collective."""
    for bucket in buckets(units, bucket_bytes):
        tensors = full_tensors([tensor for unit in bucket for tensor in unit.sources.values()], dtype=dtype)
        for unit in bucket:
            yield from unit.leave({name: next(tensors) for name in unit.sources})


def buckets(items: Sequence[_T], limit: int) -> Iterator[list[_T]]:
    """Runs of items that take up to ``limit`` bytes, or one item that is larger."""
    bucket: list[_T] = []
    size = 0
    for item in items:
        if bucket and size + item.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += item.nbytes
    if bucket:
        yield bucket
