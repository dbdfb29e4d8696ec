"""Shapes and chunks of tensors that are fused, merged or split between a checkpoint and a model.

The conversion operations of transformers are ordinary tensor code.  Here they run on tensors without data that record
the source of their elements: stacking, concatenating, splitting and transposing become arithmetic on chunks.  A rank
then reads only its own slices of a merged tensor, and no conversion needs a special case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime._torch_compat import wrapper_tensor
from fsdp_runtime._transformers_compat.conversions import Conversion
from fsdp_runtime.errors import ConversionError
from fsdp_runtime.sharded.boxes import Chunk, identity_chunk

_aten = torch.ops.aten


@dataclass(frozen=True)
class TensorSpec:
    """Full shape and dtype of an input or an output of a conversion."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[Chunk] | None = None  # an output's chunks; ``None`` if the conversion has to run on full inputs


def trace_conversion(conversion: Conversion, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the outputs of a conversion by name, without data."""
    inputs = {name: specs[name] for name in conversion.sources}
    try:
        try:
            outputs = conversion.run(
                {name: traced_input(name, spec.shape, spec.dtype) for name, spec in inputs.items()}
            )
        except _NotAChunkError:
            on_meta = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in inputs.items()}
            outputs = conversion.run(on_meta)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        listed = ", ".join(f"{name} {spec.shape}" for name, spec in list(inputs.items())[:8])
        raise ConversionError(
            f"{len(inputs)} tensors cannot be converted between checkpoint and model ({error}): {listed}. Tensors are "
            "missing, or their shapes differ from the config's"
        ) from error
    return {
        name: TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.chunks if isinstance(tensor, TracedTensor) else None)
        for name, tensor in outputs.items()
    }


class _NotAChunkError(Exception):
    """An operation does more than rearrange chunks: it interleaves elements, or computes."""


class TracedTensor(Tensor):
    """A tensor without data, filled by chunks of stored tensors that do not overlap."""

    chunks: list[Chunk]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, chunks: list[Chunk]) -> TracedTensor:
        """Create the wrapper subclass; tensors are created here, not in ``__init__``."""
        tensor: TracedTensor = wrapper_tensor(cls, shape, dtype)
        tensor.chunks = chunks
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on chunks; operations without a handler below are refused."""
        handler = _HANDLERS.get(function)
        if handler is None:
            raise _NotAChunkError(f"{function} is not a rearrangement of chunks")
        return handler(*args, **(kwargs or {}))


def traced_input(name: str, shape: Sequence[int], dtype: torch.dtype) -> TracedTensor:
    """Return the traced form of a stored tensor."""
    return TracedTensor(shape, dtype, [identity_chunk(name, shape)])


def _same(tensor: TracedTensor, **_: Any) -> TracedTensor:
    return TracedTensor(tensor.shape, tensor.dtype, tensor.chunks)


def _permute(tensor: TracedTensor, order: Sequence[int]) -> TracedTensor:
    return _with_dims(tensor, [dim % tensor.ndim for dim in order])


def _with_dims(tensor: TracedTensor, dims: Sequence[int]) -> TracedTensor:
    """Selected dims of a tensor, in order; all other dims have size 1."""
    chunks = [
        replace(chunk, target=tuple(chunk.target[dim] for dim in dims), dims=tuple(chunk.dims[dim] for dim in dims))
        for chunk in tensor.chunks
    ]
    return TracedTensor([tensor.shape[dim] for dim in dims], tensor.dtype, chunks)


def _transpose(tensor: TracedTensor, one: int, other: int) -> TracedTensor:
    order = list(range(tensor.ndim))
    order[one], order[other] = order[other], order[one]
    return _permute(tensor, order)


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    first = tensors[0]
    dim %= first.ndim
    shape = list(first.shape)
    shape[dim] = 0
    chunks: list[Chunk] = []
    for tensor in tensors:
        if [*tensor.shape[:dim], *tensor.shape[dim + 1 :]] != [*shape[:dim], *shape[dim + 1 :]]:
            raise ValueError(f"tensors of shapes {tuple(first.shape)} and {tuple(tensor.shape)} cannot be concatenated")
        chunks += [_shifted(chunk, dim, shape[dim]) for chunk in tensor.chunks]
        shape[dim] += tensor.shape[dim]
    return TracedTensor(shape, reduce(torch.promote_types, [tensor.dtype for tensor in tensors]), chunks)


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _unsqueeze(tensor: TracedTensor, dim: int) -> TracedTensor:
    dim %= tensor.ndim + 1
    chunks = [
        replace(
            chunk,
            target=(*chunk.target[:dim], (0, 1), *chunk.target[dim:]),
            dims=(*chunk.dims[:dim], None, *chunk.dims[dim:]),
        )
        for chunk in tensor.chunks
    ]
    return TracedTensor([*tensor.shape[:dim], 1, *tensor.shape[dim:]], tensor.dtype, chunks)


def _squeeze(tensor: TracedTensor, dim: int) -> TracedTensor:
    dim %= tensor.ndim
    if tensor.shape[dim] != 1:
        return _same(tensor)
    return _with_dims(tensor, [other for other in range(tensor.ndim) if other != dim])


def _squeeze_all(tensor: TracedTensor) -> TracedTensor:
    """Squeeze all dims of size 1: transformers before 5.11 splits stacked experts with this operation."""
    return _with_dims(tensor, [dim for dim, size in enumerate(tensor.shape) if size != 1])


def _slice(
    tensor: TracedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> TracedTensor:
    if step != 1:
        raise _NotAChunkError(f"a slice with step {step} is not one chunk")
    dim %= tensor.ndim
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    box = [(0, size) for size in tensor.shape]
    box[dim] = (first, last)
    inside = (chunk.intersect(tuple(box)) for chunk in tensor.chunks)
    shape = [*tensor.shape[:dim], last - first, *tensor.shape[dim + 1 :]]
    return TracedTensor(shape, tensor.dtype, [_shifted(chunk, dim, -first) for chunk in inside if chunk is not None])


def _select(tensor: TracedTensor, dim: int, index: int) -> TracedTensor:
    index %= tensor.shape[dim]
    return _squeeze(_slice(tensor, dim, index, index + 1), dim)


def _unbind(tensor: TracedTensor, dim: int = 0) -> list[TracedTensor]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _split(tensor: TracedTensor, size: int, dim: int = 0) -> list[TracedTensor]:
    return [_slice(tensor, dim, start, start + size) for start in range(0, tensor.shape[dim], size)]


def _split_with_sizes(tensor: TracedTensor, sizes: Sequence[int], dim: int = 0) -> list[TracedTensor]:
    return [_slice(tensor, dim, start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def _shifted(chunk: Chunk, dim: int, by: int) -> Chunk:
    start, stop = chunk.target[dim]
    return replace(chunk, target=(*chunk.target[:dim], (start + by, stop + by), *chunk.target[dim + 1 :]))


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.alias.default: _same,
    _aten.cat.default: _cat,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _aten.permute.default: _permute,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.squeeze.default: _squeeze_all,
    _aten.squeeze.dim: _squeeze,
    _aten.stack.default: _stack,
    _aten.t.default: lambda tensor: _permute(tensor, [1, 0]),
    _aten.transpose.int: _transpose,
    _aten.unbind.int: _unbind,
    _aten.unsqueeze.default: _unsqueeze,
}
