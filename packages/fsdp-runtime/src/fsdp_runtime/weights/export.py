"""What leaves of a model: names, shapes and dtypes, and the tensors of the model that each is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._transformers_compat import Conversion
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import require_plain
from fsdp_runtime.sharded.chunks import Piece, whole
from fsdp_runtime.weights.adapters import Factors, base_entries, factors_by_weight, merge
from fsdp_runtime.weights.conversion.convert import Source, results
from fsdp_runtime.weights.naming import Names, canonical_names, translation_out


@dataclass(frozen=True)
class Outgoing:
    """A tensor that leaves: its name, full shape and dtype there.

    Args:
        name: its name.
        shape: its shape.
        dtype: its dtype.
        pieces: which boxes of the model's tensors it is; ``None`` where only the conversion can make it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Unit:
    """Tensors of the model that are gathered together, and what leaves of them.

    Args:
        sources: the model's tensors, by the model's names.
        outgoing: what is made of them.
        conversion: what makes it, where it is not boxes of the sources.
        adapters: low-rank factors to be added to a source, by its name; they are sources too.
        nbytes: bytes of the full sources.
    """

    sources: Mapping[str, Tensor]
    outgoing: Sequence[Outgoing]
    conversion: Conversion | None
    adapters: Mapping[str, Sequence[Factors]]
    nbytes: int

    def leave(self, full: Mapping[str, Tensor]) -> Iterator[tuple[Outgoing, Tensor]]:
        """What leaves, made of the full sources; views of them where it can be."""
        merged = {name: merge(full[name], factors, full) for name, factors in self.adapters.items()}
        full = {**full, **merged}
        made: Mapping[str, Tensor] = {}
        for item in self.outgoing:
            if item.pieces is None and self.conversion is not None:
                made = made or self.conversion.run(full)
                yield item, made[item.name].contiguous()
            else:
                yield item, _assembled(item, full)


def outgoing_units(model: nn.Module, *, dtype: torch.dtype | None, names: Names) -> list[Unit]:
    """What leaves of a model, in model order; the same on every rank, and without communication.

    Raises:
        ConversionError: the model's tensors are not those that its class says, or quantised.
        OptionError: ``dtype`` is not a floating-point dtype.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise OptionError(f"dtype={dtype}: weights leave in a floating-point dtype, as torch.bfloat16")
    found = base_entries(model)
    require_plain(found)
    factors = factors_by_weight(model, found)
    model = base_model(model)
    tensors = {
        name: entry.tensor for name, entry in zip(canonical_names(model, found), found, strict=True) if name is not None
    }
    described = {
        name: Source(tuple(t.shape), dtype if dtype and t.is_floating_point() else t.dtype)
        for name, t in tensors.items()
    }
    translation = translation_out(model, list(tensors), names)
    place = {name: index for index, name in enumerate(tensors)}
    by_first = {min(conversion.sources, key=place.__getitem__): conversion for conversion in translation.conversions}
    units = []
    for name in tensors:
        if (target := translation.renamed.get(name)) is not None:
            source = described[name]
            items = [Outgoing(target, source.shape, source.dtype, [whole(name, source.shape)])]
            units.append(_unit([name], items, None, tensors, factors))
        elif (conversion := by_first.get(name)) is not None:
            made = results(conversion, described)
            items = [Outgoing(out, result.shape, result.dtype, result.pieces) for out, result in made.items()]
            units.append(_unit(conversion.sources, items, conversion, tensors, factors))
    return units


def _unit(
    names: Sequence[str],
    items: Sequence[Outgoing],
    conversion: Conversion | None,
    tensors: Mapping[str, Tensor],
    factors: Mapping[str, Sequence[Factors]],
) -> Unit:
    adapters = {name: factors[name] for name in names if name in factors}
    sources = {name: tensors[name] for name in names}
    for each in (each for members in adapters.values() for each in members):
        sources |= {each.a_name: each.a, each.b_name: each.b}
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in sources.values())
    return Unit(sources, items, conversion, adapters, nbytes)


def _assembled(item: Outgoing, full: Mapping[str, Tensor]) -> Tensor:
    boxes = [(piece, piece.in_target(full[piece.source][piece.stored])) for piece in item.pieces or ()]
    if len(boxes) == 1:
        return boxes[0][1].contiguous()
    any_source = next(iter(full.values()))
    tensor = torch.empty(item.shape, dtype=item.dtype, device=any_source.device)
    for piece, values in boxes:
        tensor[piece.target] = values
    return tensor
