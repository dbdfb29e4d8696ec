"""Gather the full weights of a sharded model a bucket at a time, and describe them without communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.inference_mode import without_inference_mode
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.sync.quantize.formats import Quantization
from fsdp_runtime.weights.export import ExportedTensor, ExportGroup, export_groups
from fsdp_runtime.weights.naming import Names

#: Names and full tensors, all of one dtype.
Bucket = list[tuple[str, Tensor]]

DEFAULT_BUCKET_BYTES = 256 * 2**20

_T = TypeVar("_T", ExportGroup, ExportedTensor, "WeightInfo")


@dataclass(frozen=True)
class WeightInfo:
    """The metadata with which a receiver allocates a weight.

    Args:
        name: the weight's name.
        dtype: its dtype.
        shape: its full shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightExport:
    """A prepared export of a model's weights, for several uses: metadata, a stream, buckets.

    Preparing resolves names and conversions, without communication.  The export refers to the model's parameters and
    buffers: prepare a new one after these were replaced (values may change, as in training).

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        dtype: convert floating-point tensors to this dtype before they are communicated; ``None`` keeps each one's.
        names: ``"checkpoint"`` for the names of the Hugging Face checkpoint, ``"model"`` for the model's own.
        quantize: export linear layers in low precision, with their scales; other weights then default to bfloat16.

    Raises:
        ConversionError: the model's tensors differ from those of its class (``names="model"`` works), or are quantized.
        OptionError: ``dtype`` is not a floating-point dtype, or ``names`` is unknown.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import WeightExport
        >>> export = WeightExport(nn.Linear(2, 3))
        >>> [(weight.name, weight.shape) for weight in export.metadata()]
        [('weight', (3, 2)), ('bias', (3,))]
        >>> [name for bucket in export.buckets() for name, tensor in bucket]
        ['weight', 'bias']
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        names: Names = "checkpoint",
        quantize: Quantization | None = None,
        entries: Sequence[StateEntry] | None = None,
    ) -> None:
        dtype = torch.bfloat16 if dtype is None and quantize is not None else dtype
        self._dtype, self._quantize = dtype, quantize
        self._groups = export_groups(model, dtype=dtype, names=names, entries=entries)

    @property
    def groups(self) -> list[ExportGroup]:
        """The tensors of the model that are exported together, in order."""
        return self._groups

    @property
    def tensors(self) -> list[ExportedTensor]:
        """Every exported tensor in order, with the chunks that it is built from."""
        return [part for group in self._groups for item in group.tensors for part in self._parts(item)]

    @property
    def kept_modules(self) -> list[str]:
        """The modules of weights of two dims that are not quantized, for a quantized checkpoint's config."""
        weights = [item.name for group in self._groups for item in group.tensors if len(item.shape) == 2]
        stored = {item.name for item in self.tensors if not item.dtype.is_floating_point or item.dtype.itemsize < 2}
        return [name.removesuffix(".weight") for name in weights if name not in stored]

    def metadata(self) -> list[WeightInfo]:
        """Return names, dtypes and shapes in the order of :meth:`stream`; no communication."""
        return [WeightInfo(item.name, item.dtype, item.shape) for item in self.tensors]

    def stream(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight as a full plain tensor, on every rank; see :func:`stream_weights`.  Collective."""
        return without_inference_mode(self._stream(bucket_bytes))

    def buckets(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket]:
        """Yield lists of weights of one dtype, up to ``bucket_bytes``; see :func:`stream_buckets`.  Collective."""
        return without_inference_mode(self._buckets(bucket_bytes))

    def _stream(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        for groups in self._batches(bucket_bytes):
            for item, tensor in self.gather(groups):
                yield item.name, tensor
                del tensor

    def _buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        for groups in self._batches(bucket_bytes):  # no bucket waits here while the next groups are gathered
            open_buckets: dict[torch.dtype, Bucket] = {}  # quantized weights and their scales alternate
            sizes: dict[torch.dtype, int] = {}
            for item, tensor in self.gather(groups):
                size = sizes.get(tensor.dtype, 0) + tensor.nbytes
                if size > bucket_bytes and tensor.dtype in open_buckets:
                    yield open_buckets.pop(tensor.dtype)
                    size = tensor.nbytes
                open_buckets.setdefault(tensor.dtype, []).append((item.name, tensor))
                sizes[tensor.dtype] = size
                del tensor
            while open_buckets:
                yield open_buckets.pop(next(iter(open_buckets)))

    def _batches(self, bucket_bytes: int) -> Iterator[list[ExportGroup]]:
        """Yield the groups that are gathered together."""
        if bucket_bytes < 1:
            raise OptionError(f"bucket_bytes={bucket_bytes}: give a positive number of bytes")
        yield from split_by_bytes(self._groups, bucket_bytes)

    def gather(self, groups: Sequence[ExportGroup]) -> Iterator[tuple[ExportedTensor, Tensor]]:
        """Yield the weights of some of the groups, gathered together.  Collective."""
        full = full_tensors([tensor for group in groups for tensor in group.sources.values()], dtype=self._dtype)
        for group in groups:
            for item, tensor in group.produce({name: next(full) for name in group.sources}):
                parts = self._parts(item)
                if self._quantize is None or parts[0] is item:
                    yield item, tensor
                    continue
                yield from zip(parts, self._quantize.quantize(tensor), strict=True)

    def _parts(self, item: ExportedTensor) -> list[ExportedTensor]:
        """The tensors that a weight is exported as: itself, or its quantized values and scales."""
        if self._quantize is None or not self._quantize.applies(item.name, item.shape):
            return [item]
        return [
            ExportedTensor(part.name, part.shape, part.dtype, None)
            for part in self._quantize.parts(item.name, item.shape)
        ]


def stream_weights(
    model: nn.Module,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    names: Names = "checkpoint",
    quantize: Quantization | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a model as a full plain tensor, on every rank, in model order.

    Collective: every rank has to exhaust the iterator.  A tied weight is yielded once, under the name that
    ``save_pretrained`` gives it; a weight that modules of a transformers model share without a declaration in its
    class, under each of its names.  The values are the optimizer's parameters, also while ``unsharded`` holds copies in
    another dtype.

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        bucket_bytes: gather parameters together up to this many bytes of full tensors, at least one parameter.  The
            peak is about this plus the largest parameter, plus the buffers of one more axis under TP and FSDP2.
        dtype: convert floating-point tensors to this dtype before they are communicated; ``None`` keeps each one's.
        names: ``"checkpoint"`` for the names of the Hugging Face checkpoint, ``"model"`` for the model's own.
        quantize: export linear layers in low precision, with their scales; other weights then default to bfloat16.

    Yields:
        Name and tensor, on the device that the model computes on.  A tensor that is not sharded is the model's own
        storage, and weights that the checkpoint stores separately may share storage, so do not write to them.  To
        bound memory, drop each tensor before requesting the next.

    Raises:
        ConversionError: the model's tensors differ from those of its class (``names="model"`` works), or are quantized.
        OptionError: ``bucket_bytes`` is not positive, ``dtype`` not a floating-point dtype, or ``names`` unknown.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime import stream_weights
        >>> for name, tensor in stream_weights(nn.Linear(2, 3), dtype=torch.bfloat16):
        ...     print(name, tuple(tensor.shape), tensor.dtype)
        weight (3, 2) torch.bfloat16
        bias (3,) torch.bfloat16
    """
    yield from WeightExport(model, dtype=dtype, names=names, quantize=quantize).stream(bucket_bytes)


def stream_buckets(
    model: nn.Module,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    names: Names = "checkpoint",
    quantize: Quantization | None = None,
) -> Iterator[Bucket]:
    """Yield the weights of :func:`stream_weights` in lists, each of one dtype and up to ``bucket_bytes``.

    For receivers in this process, such as vLLM's ``load_weights``.  Collective: every rank has to exhaust the iterator.
    Drop a bucket before requesting the next.

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        bucket_bytes: bytes of a list; a larger weight has a list of its own.
        dtype: convert floating-point tensors to this dtype before they are communicated; ``None`` keeps each one's.
        names: ``"checkpoint"`` for the names of the Hugging Face checkpoint, ``"model"`` for the model's own.
        quantize: export linear layers in low precision, with their scales; other weights then default to bfloat16.

    Yields:
        Lists of names and full tensors.

    Raises:
        ConversionError: the model's tensors differ from those of its class (``names="model"`` works), or are quantized.
        OptionError: ``bucket_bytes`` is not positive, ``dtype`` not a floating-point dtype, or ``names`` unknown.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.weights import stream_buckets
        >>> engine = nn.Linear(2, 3)
        >>> for bucket in stream_buckets(nn.Linear(2, 3)):
        ...     _ = engine.load_state_dict(dict(bucket))
    """
    yield from WeightExport(model, dtype=dtype, names=names, quantize=quantize).buckets(bucket_bytes)


def describe_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    names: Names = "checkpoint",
    quantize: Quantization | None = None,
) -> list[WeightInfo]:
    """Return names, dtypes and shapes of :func:`stream_weights` with the same arguments, in its order.

    No communication; equal on every rank.

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        dtype: dtype of exported floating-point tensors; ``None`` keeps each one's.
        names: ``"checkpoint"`` for the names of the Hugging Face checkpoint, ``"model"`` for the model's own.
        quantize: export linear layers in low precision, with their scales; other weights then default to bfloat16.

    Returns:
        One entry per weight.

    Raises:
        ConversionError: the model's tensors differ from those of its class (``names="model"`` works), or are quantized.
        OptionError: ``dtype`` is not a floating-point dtype, or ``names`` is unknown.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime.weights import describe_weights
        >>> describe_weights(nn.Linear(2, 3, bias=False), dtype=torch.bfloat16)
        [WeightInfo(name='weight', dtype=torch.bfloat16, shape=(3, 2))]
    """
    return WeightExport(model, dtype=dtype, names=names, quantize=quantize).metadata()


def split_by_bytes(items: Sequence[_T], limit: int) -> Iterator[list[_T]]:
    """Yield runs of items of up to ``limit`` bytes, or one item that is larger."""
    batch: list[_T] = []
    size = 0
    for item in items:
        if batch and size + item.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.nbytes
    if batch:
        yield batch
