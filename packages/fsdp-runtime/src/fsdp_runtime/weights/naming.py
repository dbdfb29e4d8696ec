"""Names: the model's, the checkpoint's, and which of several tied names is the one on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from fsdp_runtime import _transformers_compat as transformers_compat
from fsdp_runtime._transformers_compat import Conversion, Translation
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import Entry
from fsdp_runtime.sharded.chunks import Piece, whole
from fsdp_runtime.weights.conversion.convert import Source, results
from fsdp_runtime.weights.hub_checkpoint import StoredTensor

Names = Literal["checkpoint", "model"]


@dataclass(frozen=True)
class Origin:
    """Where a tensor of the model comes from.

    Args:
        shape: the shape that the checkpoint gives it.
        stored: the checkpoint's names of what it is made of.
        pieces: which boxes of those; ``None`` where it takes the conversion.
        conversion: what makes it, where it is not stored as it is.
    """

    shape: tuple[int, ...]
    stored: tuple[str, ...]
    pieces: Sequence[Piece] | None
    conversion: Conversion | None = None


@dataclass(frozen=True)
class Sources:
    """Where a model's tensors come from.

    Args:
        by_model_name: the origin by the model's name.
        unexpected: names in the checkpoint that fit nothing.
        rules: the renamings and conversions that applied, as transformers has them.
    """

    by_model_name: Mapping[str, Origin]
    unexpected: Sequence[str]
    rules: list[Any]


def sources(model: nn.Module, found: Sequence[Entry], stored: Mapping[str, StoredTensor]) -> Sources:
    """Match a checkpoint's tensors with the model's.

    Raises:
        ConversionError: tensors that are to be fused, merged or cut do not fit together.
    """
    known = {name for entry in found for name in entry.names}
    translation = transformers_compat.into_model(model, stored, known)
    origins = {
        target: Origin(stored[name].shape, (name,), [whole(name, stored[name].shape)])
        for name, target in translation.renamed.items()
        if target in known
    }
    shapes = {name: Source(tensor.shape, torch.float32) for name, tensor in stored.items()}
    unexpected = {name: target for name, target in translation.renamed.items() if target not in known}
    for conversion in translation.conversions:
        made = results(conversion, shapes)
        for target, result in made.items():
            origins[target] = Origin(result.shape, _used(conversion, result.pieces), result.pieces, conversion)
    return Sources(
        by_model_name=origins,
        unexpected=[
            name for name, target in unexpected.items() if not transformers_compat.is_ignored_on_load(model, target)
        ],
        rules=translation.rules,
    )


def _used(conversion: Conversion, pieces: Sequence[Piece] | None) -> tuple[str, ...]:
    return conversion.sources if pieces is None else tuple(dict.fromkeys(piece.source for piece in pieces))


def canonical_names(model: nn.Module, found: Sequence[Entry]) -> list[str | None]:
    """For every entry the one of its names that counts, or ``None`` for an entry that is not saved."""
    aliases, ignored = transformers_compat.declared_aliases(model), transformers_compat.ignored_on_save(model)
    canonical = [next((name for name in entry.names if name not in aliases), entry.names[0]) for entry in found]
    return [None if name in ignored else name for name in canonical]


def translation_out(model: nn.Module, canonical: Sequence[str], names: Names) -> Translation:
    """How the model's tensors leave.

    Raises:
        OptionError: ``names`` is neither ``"checkpoint"`` nor ``"model"``.
    """
    if names not in get_args(Names):
        raise OptionError(f"names={names!r}: write 'checkpoint' or 'model'")
    if names == "model":
        return Translation({name: name for name in canonical}, ())
    return transformers_compat.out_of_model(model, canonical)
