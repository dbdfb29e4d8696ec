"""Full weights out of a sharded model, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_runtime.errors import OptionError
from fsdp_runtime.weights.entries import entries
from fsdp_runtime.weights.gather import full_tensors
from fsdp_runtime.weights.names import Names, outgoing_names


@dataclass(frozen=True)
class Outgoing:
    """A tensor on its way out: its name there, the model's tensor, and the dtype that it leaves in."""

    name: str
    tensor: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The full tensor's shape."""
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.tensor.numel() * self.dtype.itemsize


def outgoing(model: nn.Module, *, dtype: torch.dtype | None, names: Names) -> list[Outgoing]:
    """What a model's checkpoint holds, in model order; the same on every rank.

    Raises:
        ConversionError: see :func:`stream_weights`.
        OptionError: ``dtype`` is not a floating-point dtype.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise OptionError(f"dtype={dtype}: weights leave in a floating-point dtype, as torch.bfloat16")
    found = entries(model)
    return [
        Outgoing(name, entry.tensor, dtype if dtype and entry.tensor.is_floating_point() else entry.tensor.dtype)
        for entry, name in zip(found, outgoing_names(model, found, names), strict=True)
        if name is not None
    ]


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
        storage, so do not write to it; to bound memory, drop each tensor before asking for the next.

    Raises:
        ConversionError: the checkpoint's form has tensors cut otherwise than the model's; ``names="model"`` works.
    """
    if bucket_bytes < 1:
        raise OptionError(f"bucket_bytes={bucket_bytes}: give a positive number of bytes")
    for item, tensor in gathered(outgoing(model, dtype=dtype, names=names), bucket_bytes, dtype=dtype):
        yield item.name, tensor


def gathered(
    items: list[Outgoing], bucket_bytes: int, *, dtype: torch.dtype | None
) -> Iterator[tuple[Outgoing, Tensor]]:
    """Every item with its full tensor, gathered a bucket at a time; collective."""
    for bucket in buckets(items, bucket_bytes):
        tensors = full_tensors([item.tensor for item in bucket], dtype=dtype)
        for item in bucket:
            yield item, next(tensors)


def buckets(items: list[Outgoing], limit: int) -> Iterator[list[Outgoing]]:
    """Runs of items whose full tensors take up to ``limit`` bytes, or one item that is larger."""
    bucket: list[Outgoing] = []
    size = 0
    for item in items:
        if bucket and size + item.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += item.nbytes
    if bucket:
        yield bucket
