"""Tensors that a checkpoint fuses, merges or cuts otherwise than the model, in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_runtime._transformers_compat import Conversion
from fsdp_runtime.errors import ConversionError
from fsdp_runtime.sharded.chunks import Piece
from fsdp_runtime.weights.conversion.trace import Assembled, NotAssembledError, stored


@dataclass(frozen=True)
class Source:
    """A tensor that goes into a conversion: its full shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Result:
    """A tensor that comes out of a conversion.

    Args:
        shape: its full shape.
        dtype: its dtype.
        pieces: where its elements are in the sources; ``None`` where they are not boxes of them, so that it takes
            the whole sources and the conversion itself.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece] | None


def results(conversion: Conversion, sources: Mapping[str, Source]) -> dict[str, Result]:
    """What a conversion gives, by name, found without any data.

    Raises:
        ConversionError: it does not take sources of these shapes, or of this number.
    """
    members = {name: sources[name] for name in conversion.sources}
    try:
        try:
            made = conversion.run({n: stored(n, source.shape, source.dtype) for n, source in members.items()})
        except NotAssembledError:
            made = conversion.run({n: _on_meta(source) for n, source in members.items()})
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        listed = ", ".join(f"{name} {source.shape}" for name, source in list(members.items())[:8])
        raise ConversionError(
            f"{len(members)} tensors cannot be converted between checkpoint and model ({error}): {listed}. Tensors are "
            "missing, or of other shapes than the config says"
        ) from error
    return {name: _result(tensor) for name, tensor in made.items()}


def _result(tensor: Tensor) -> Result:
    pieces = tensor.pieces if isinstance(tensor, Assembled) else None
    return Result(tuple(tensor.shape), tensor.dtype, pieces)


def _on_meta(source: Source) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device="meta")
