"""Gather the full weights of a sharded model a bucket at a time, and describe them without communication."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import adapters_in_force
from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime._transformers_compat.dtypes import kept_dtypes
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.inference_mode import without_inference_mode
from fsdp_runtime.model.state import StateEntry, state_entries
from fsdp_runtime.sharded.collectives import first_rank_speaks, own_rank
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.sharded.model_state import ModelState, StageRanks
from fsdp_runtime.sharded.safetensors_io import WeightInfo
from fsdp_runtime.weights.export import ExportedTensor, ExportGroup, Names, export_groups
from fsdp_runtime.weights.files import split_by_bytes
from fsdp_runtime.weights.quantize.formats import FORMATS, Quantization

#: Names and full tensors, all of one dtype.
Bucket = list[tuple[str, Tensor]]
_Started = TypeVar("_Started")

DEFAULT_BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightExport:
    """Options of an export: dtype, names and precision of the weights, and the bytes of one gather.

    Every export takes these options: :func:`~fsdp_runtime.sync.send_weights`, :class:`~fsdp_runtime.sync.ModelShards`,
    :class:`~fsdp_runtime.sync.WeightSource`, :func:`~fsdp_runtime.sync.digest`, and the methods of this class.

    Args:
        dtype: round floating-point tensors to this dtype, after adapters were merged.  Tensors that
            ``from_pretrained(dtype=dtype)`` leaves in another dtype, such as routing biases in float32, get that dtype;
            ``None`` keeps the dtype of each tensor.
        names: ``"checkpoint"`` for the names of the Hugging Face checkpoint, ``"model"`` for the model's names.
        quantize: export linear layers in low precision, with their scales, except layers that the model's class keeps
            in float32; other weights then default to bfloat16.
        bucket_bytes: gather up to this many bytes of full tensors at once, at least one parameter.  Peak memory is
            about ``bucket_bytes * (1 + buckets_ahead)`` plus the largest parameter; under TP with FSDP2, plus the
            buffers of one more axis.
        buckets_ahead: gather up to this many further buckets while the caller uses one; 0 for the least memory.

    Raises:
        OptionError: ``bucket_bytes`` is not positive, ``buckets_ahead`` negative, or ``quantize`` is no
            ``Quantization``; at use, ``dtype`` is not a floating-point dtype, or ``names`` is unknown.
        ConversionError: at use, the model's tensors differ from its class's tensors (``names="model"`` works), or are
            quantized.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime.sync import WeightExport
        >>> model, export = nn.Linear(2, 3), WeightExport(dtype=torch.bfloat16)
        >>> export.describe(model)[0]
        WeightInfo(name='weight', dtype=torch.bfloat16, shape=(3, 2))
        >>> [name for bucket in export.buckets(model) for name, tensor in bucket]
        ['weight', 'bias']
    """

    dtype: torch.dtype | None = None
    names: Names = "checkpoint"
    quantize: Quantization | None = None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    buckets_ahead: int = 1

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise OptionError(f"bucket_bytes={self.bucket_bytes}: give a positive number of bytes")
        if self.buckets_ahead < 0:
            raise OptionError(f"buckets_ahead={self.buckets_ahead}: give 0 or more")
        quantize: object = self.quantize
        if quantize is not None and not isinstance(quantize, Quantization):
            raise OptionError(
                f"quantize={quantize!r}: give Quantization(format=...) of fsdp_runtime.sync, the format one of "
                f"{FORMATS}, or None for no quantization"
            )

    @property
    def exported_dtype(self) -> torch.dtype | None:
        """The dtype of floating-point tensors that are not quantized; ``None`` keeps the dtype of each tensor."""
        return torch.bfloat16 if self.dtype is None and self.quantize is not None else self.dtype

    def describe(self, model: nn.Module) -> list[WeightInfo]:
        """Return names, dtypes and shapes in the order of :meth:`stream`; no communication, equal on every rank."""
        return self.prepare(model).metadata()

    def stream(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight as a full plain tensor, on every rank; see :func:`~fsdp_runtime.stream_weights`."""
        yield from self.prepare(model).stream()

    def buckets(self, model: nn.Module) -> Iterator[Bucket]:
        """Yield the weights of :meth:`stream` in lists, each of one dtype and up to ``bucket_bytes``.

        For receivers in this process, such as vLLM's ``load_weights``.  Collective: every rank has to exhaust the
        iterator.  A larger weight is alone in its list.  Drop a bucket before requesting the next.
        """
        yield from self.prepare(model).buckets()

    def prepare(self, model: nn.Module | ModelState) -> ExportedModel:
        """Resolve names and conversions once for several uses, for instance one per step; no communication."""
        state = model if isinstance(model, ModelState) else ModelState(model)
        base, quantize = state.base.module, self.quantize
        with first_rank_speaks(state.ranks.groups):
            groups = export_groups(state.base, state.whole, dtype=self.exported_dtype, names=self.names)
            if quantize is not None:  # the class keeps some tensors in another dtype while the model is in bfloat16
                fixed = kept_dtypes(base, [name for group in groups for name in group.dtypes], torch.bfloat16)
                kept = [item.name for group in groups if fixed.keys() & group.dtypes.keys() for item in group.tensors]
                quantize = replace(quantize, keep=(*quantize.keep, *kept))
                for index, group in enumerate(groups):
                    items = [replace(item, parts=quantize.parts(item.name, item.shape)) for item in group.tensors]
                    groups[index] = replace(group, tensors=items)
        return ExportedModel(replace(self, quantize=quantize), base, groups, state.stages)


@dataclass(frozen=True)
class ExportedModel:
    """A model's weights with names and conversions resolved; metadata, stream and buckets may be used repeatedly."""

    # It refers to the model's tensors: values may change in training. After tensors are replaced, prepare a new export.

    options: WeightExport
    base: nn.Module  # the model without peft's wrappers
    groups: list[ExportGroup]
    stages: StageRanks | None

    def gathered_dtypes(self, group: ExportGroup) -> list[torch.dtype]:
        """Dtypes of a group's sources in a gather: the narrower export dtype if no computation follows the gather."""
        rearranged = (item.chunks is not None and not item.parts for item in group.tensors)
        rounds = not group.adapters and all(rearranged)
        exported = {item.dtype for item in group.tensors}
        dtypes = []
        for name, tensor in group.sources.items():
            is_narrower = rounds and exported == {group.dtypes[name]} and group.dtypes[name].itemsize < tensor.itemsize
            dtypes.append(group.dtypes[name] if is_narrower else tensor.dtype)
        return dtypes

    @property
    def weights(self) -> list[ExportedTensor]:
        """Every exported weight in order, quantized or not."""
        return [item for group in self.groups for item in group.tensors]

    @property
    def tensors(self) -> list[WeightInfo]:
        """Every tensor in a file or a stream, in order."""
        return [part for item in self.weights for part in item.stored]

    @property
    def config_dtype(self) -> torch.dtype:
        """The dtype for a checkpoint's config."""
        floating = (item.dtype for item in self.tensors if item.dtype.is_floating_point)
        return self.options.exported_dtype or next(floating, torch.get_default_dtype())

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """The entry of a quantized checkpoint's config; it names the two-dimensional weights that are not quantized."""
        if self.options.quantize is None:
            return None
        matrices = (item for item in self.weights if len(item.shape) == 2 and not item.parts)
        kept = [item.name for item in matrices if item.dtype.is_floating_point and item.dtype.itemsize > 1]
        return self.options.quantize.config([name.removesuffix(".weight") for name in kept])

    def metadata(self) -> list[WeightInfo]:
        """Return names, dtypes and shapes in the order of :meth:`stream`; no communication."""
        return [WeightInfo(item.name, item.dtype, item.shape) for item in self.tensors]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight as a full plain tensor, on every rank.  Collective."""
        for gathered in self._ahead(None):
            for item, tensor in gathered:
                yield item.name, tensor
                del tensor

    def _ahead(self, to: int | None) -> Iterator[Iterator[tuple[WeightInfo, Tensor]]]:
        """Yield one iterator over weights per run of groups; the next runs are gathered meanwhile."""
        of_stages = (list(groups) for _, groups in itertools.groupby(self.groups, lambda group: group.ranks))
        runs = (run for groups in of_stages for run in split_by_bytes(groups, self.options.bucket_bytes))
        gathers = (without_inference_mode(self.gather(groups, to)) for groups in runs)
        return without_inference_mode(started_ahead(gathers, self.options.buckets_ahead))

    def buckets(self, to: int | None = None) -> Iterator[Bucket]:
        """Yield lists of weights of one dtype, up to ``bucket_bytes``, on rank ``to`` or on all.  Collective."""
        limit = self.options.bucket_bytes
        for gathered in self._ahead(to):  # no bucket waits here while the next groups are gathered
            open_buckets: dict[torch.dtype, Bucket] = {}  # quantized weights and their scales alternate
            sizes: dict[torch.dtype, int] = {}
            for item, tensor in gathered:
                size = sizes.get(tensor.dtype, 0) + tensor.nbytes
                if size > limit and tensor.dtype in open_buckets:
                    yield open_buckets.pop(tensor.dtype)
                    size = tensor.nbytes
                open_buckets.setdefault(tensor.dtype, []).append((item.name, tensor))
                sizes[tensor.dtype] = size
                del tensor
            while open_buckets:
                yield open_buckets.pop(next(iter(open_buckets)))

    def gather(self, groups: Sequence[ExportGroup], to: int | None = None) -> Iterator[tuple[WeightInfo, Tensor]]:
        """Start the gathers of groups, all of the same ranks; the caller must exhaust the iterator.  Collective."""
        sources = [tensor for group in groups for tensor in group.sources.values()]
        dtypes = [dtype for group in groups for dtype in self.gathered_dtypes(group)]
        holders = groups[0].ranks
        if self.stages is not None and holders is not None and to not in holders:
            full = self.stages.full_tensors(sources, dtypes, holders, to)
        elif holders is not None and own_rank() not in holders:
            return iter(())
        else:
            full = full_tensors(sources, dtypes=dtypes, to=to)
        return self._produced(groups, full, is_needed=to is None or to == own_rank())

    def _produced(
        self, groups: Sequence[ExportGroup], full: Iterator[Tensor], *, is_needed: bool
    ) -> Iterator[tuple[WeightInfo, Tensor]]:
        if not is_needed:
            deque(full, maxlen=0)  # takes part in the gathers
            return
        for group in groups:
            for item, tensor in group.produce({name: next(full) for name in group.sources}):
                if self.options.quantize is None or not item.parts:
                    yield item, tensor.to(item.dtype)
                else:
                    yield from zip(item.parts, self.options.quantize.quantize(tensor), strict=True)


def started_ahead(gathers: Iterator[_Started], count: int) -> Iterator[_Started]:
    """Yield gathers in order; the next ``count`` gathers have started when one is yielded."""
    started: deque[_Started] = deque()
    for gather in gathers:
        started.append(gather)
        if len(started) > count:
            yield started.popleft()
    while started:
        yield started.popleft()


def stream_weights(
    model: nn.Module,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    names: Names = "checkpoint",
    quantize: Quantization | None = None,
    buckets_ahead: int = 1,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a model as a full plain tensor, on every rank, in model order.

    Collective: every rank has to exhaust the iterator.  A tied weight is yielded once, under its name in
    ``save_pretrained``.  A weight that modules of a transformers model share without a declaration in the model's
    class is yielded under each of its names.  Values come from the optimizer's parameters, even while ``unsharded``
    holds copies in another dtype.

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        bucket_bytes: as in :class:`~fsdp_runtime.sync.WeightExport`, like all further options.
        dtype: the dtype of floating-point tensors.
        names: ``"checkpoint"`` or ``"model"``.
        quantize: low precision of linear layers.
        buckets_ahead: further buckets that are gathered while the caller uses one.

    Yields:
        Name and tensor, on the model's compute device.  Do not write to the tensor: a plain parameter is yielded
        without a copy, and weights that the checkpoint stores separately may share storage.  To bound memory, drop
        each tensor before requesting the next.

    Raises:
        ConversionError, OptionError: as ``WeightExport``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime import stream_weights
        >>> for name, tensor in stream_weights(nn.Linear(2, 3), dtype=torch.bfloat16):
        ...     print(name, tuple(tensor.shape), tensor.dtype)
        weight (3, 2) torch.bfloat16
        bias (3,) torch.bfloat16
    """
    export = WeightExport(
        dtype=dtype, names=names, quantize=quantize, bucket_bytes=bucket_bytes, buckets_ahead=buckets_ahead
    )
    yield from export.stream(model)


class HeldTensors:
    """A model's tensors and adapters at one moment; the object keeps the tensors' memory alive."""

    # Tensors are compared by their memory: ``.to()`` moves a parameter's data and keeps the parameter; offloading
    # empties the storage and keeps it.

    def __init__(self, model: nn.Module, entries: Sequence[StateEntry] | None = None) -> None:
        entries = state_entries(model) if entries is None else entries
        self._model, self._adapters = model, adapters_in_force(model)
        self._tensors = [local_tensor(entry.tensor).detach() for entry in entries]

    def difference(self) -> str | None:
        """Return a message if tensors or adapters were replaced since construction, else ``None``."""
        pairs = itertools.zip_longest(state_entries(self._model), self._tensors)
        replaced = [
            entry for entry, held in pairs if entry is None or held is None or _memory(entry.tensor) != _memory(held)
        ]
        if replaced:
            first = f" (first {replaced[0].names[0]})" if replaced[0] else ""
            return f"{len(replaced)} of the model's tensors were replaced{first}"
        return None if self._adapters == adapters_in_force(self._model) else "the adapters have changed"


def _memory(tensor: Tensor) -> tuple[object, ...]:
    local = local_tensor(tensor)
    start = local.untyped_storage().data_ptr()
    return local.device, local.dtype, local.shape, local.stride(), local.storage_offset(), start
