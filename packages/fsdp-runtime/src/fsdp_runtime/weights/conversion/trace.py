"""Tensors that only remember where their elements come from: a conversion run on them yields a reading plan.

transformers' conversion operations are ordinary tensor code.  Run on these tensors, stacking, concatenating,
splitting and transposing become arithmetic on boxes, so that a rank can read the slices that it needs of what would
be merged, and no operation has to be known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime._torch_compat import wrapper_tensor
from fsdp_runtime.sharded.chunks import Piece, whole

_aten = torch.ops.aten


class NotAssembledError(Exception):
    """An operation does more than to put boxes together (it interleaves, or computes)."""


class Assembled(Tensor):
    """A tensor without elements, made of boxes of stored tensors.

    Args:
        shape: the tensor's shape.
        dtype: its dtype.
        pieces: boxes that fill it and do not overlap.
    """

    pieces: list[Piece]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: list[Piece]) -> Assembled:
        """A subclass of Tensor is made here and not in ``__init__``."""
        made: Assembled = wrapper_tensor(cls, shape, dtype)
        made.pieces = pieces
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every operation that torch breaks down into those below works; others are refused."""
        handler = _HANDLERS.get(function)
        if handler is None:
            raise NotAssembledError(f"{function} does not only move boxes")
        return handler(*args, **(kwargs or {}))


def stored(name: str, shape: Sequence[int], dtype: torch.dtype) -> Assembled:
    """A stored tensor as it is."""
    return Assembled(shape, dtype, [whole(name, shape)])


def _same(tensor: Assembled, **_: Any) -> Assembled:
    return Assembled(tensor.shape, tensor.dtype, tensor.pieces)


def _permute(tensor: Assembled, order: Sequence[int]) -> Assembled:
    order = [dim % tensor.ndim for dim in order]
    pieces = [
        replace(
            piece,
            target=tuple(piece.target[dim] for dim in order),
            dims=tuple(piece.dims[dim] for dim in order),
        )
        for piece in tensor.pieces
    ]
    return Assembled([tensor.shape[dim] for dim in order], tensor.dtype, pieces)


def _transpose(tensor: Assembled, one: int, other: int) -> Assembled:
    order = list(range(tensor.ndim))
    order[one], order[other] = order[other], order[one]
    return _permute(tensor, order)


def _cat(tensors: Sequence[Assembled], dim: int = 0) -> Assembled:
    first = tensors[0]
    dim %= first.ndim
    shape = list(first.shape)
    shape[dim] = 0
    pieces: list[Piece] = []
    for tensor in tensors:
        if [*tensor.shape[:dim], *tensor.shape[dim + 1 :]] != [*shape[:dim], *shape[dim + 1 :]]:
            raise ValueError(f"tensors of shapes {tuple(first.shape)} and {tuple(tensor.shape)} cannot be joined")
        pieces += [_moved(piece, dim, shape[dim]) for piece in tensor.pieces]
        shape[dim] += tensor.shape[dim]
    return Assembled(shape, first.dtype, pieces)


def _stack(tensors: Sequence[Assembled], dim: int = 0) -> Assembled:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _unsqueeze(tensor: Assembled, dim: int) -> Assembled:
    dim %= tensor.ndim + 1
    pieces = [
        replace(
            piece,
            target=(*piece.target[:dim], slice(0, 1), *piece.target[dim:]),
            dims=(*piece.dims[:dim], None, *piece.dims[dim:]),
        )
        for piece in tensor.pieces
    ]
    return Assembled([*tensor.shape[:dim], 1, *tensor.shape[dim:]], tensor.dtype, pieces)


def _squeeze(tensor: Assembled, dim: int) -> Assembled:
    dim %= tensor.ndim
    if tensor.shape[dim] != 1:
        return _same(tensor)
    pieces = [
        replace(
            piece,
            target=(*piece.target[:dim], *piece.target[dim + 1 :]),
            dims=(*piece.dims[:dim], *piece.dims[dim + 1 :]),
        )
        for piece in tensor.pieces
    ]
    return Assembled([*tensor.shape[:dim], *tensor.shape[dim + 1 :]], tensor.dtype, pieces)


def _slice(
    tensor: Assembled, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Assembled:
    if step != 1:
        raise NotAssembledError(f"a slice with step {step} is no box")
    dim %= tensor.ndim
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    box = [slice(0, size) for size in tensor.shape]
    box[dim] = slice(first, last)
    inside = (piece.within(tuple(box)) for piece in tensor.pieces)
    shape = [side.stop - side.start for side in box]
    return Assembled(shape, tensor.dtype, [_moved(piece, dim, -first) for piece in inside if piece is not None])


def _select(tensor: Assembled, dim: int, index: int) -> Assembled:
    index %= tensor.shape[dim]
    return _squeeze(_slice(tensor, dim, index, index + 1), dim)


def _unbind(tensor: Assembled, dim: int = 0) -> list[Assembled]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _split(tensor: Assembled, size: int, dim: int = 0) -> list[Assembled]:
    return [_slice(tensor, dim, start, start + size) for start in range(0, tensor.shape[dim], size)]


def _split_with_sizes(tensor: Assembled, sizes: Sequence[int], dim: int = 0) -> list[Assembled]:
    def parts() -> Iterator[Assembled]:
        start = 0
        for size in sizes:
            yield _slice(tensor, dim, start, start + size)
            start += size

    return list(parts())


def _moved(piece: Piece, dim: int, by: int) -> Piece:
    side = piece.target[dim]
    moved = slice(side.start + by, side.stop + by)
    return replace(piece, target=(*piece.target[:dim], moved, *piece.target[dim + 1 :]))


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
    _aten.squeeze.dim: _squeeze,
    _aten.stack.default: _stack,
    _aten.t.default: lambda tensor: _permute(tensor, [1, 0]),
    _aten.transpose.int: _transpose,
    _aten.unbind.int: _unbind,
    _aten.unsqueeze.default: _unsqueeze,
}
