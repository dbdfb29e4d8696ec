"""Inputs of a model's embeddings: ``position_ids``, positions derived from other inputs, and padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor

from fsdp_runtime.model.structure import ModelStructure
from tp_plans.model_tree import ancestors, is_at_or_below, parent
from tp_plans.runtime import referenced_names, takes_argument

_POSITIONS = "position_ids"

#: Modules outside of token mixers that read several tokens or the length of the row, each with its reason.  The run of
#: ``steps.context.verify`` finds further modules.
_NEEDS_FULL_ROW = {
    "BigBirdModel": "chooses its sparse attention by the length of the row",
    "LongformerModel": "pads the row to a multiple of its window",
    "LukeModel": "joins the masks of words and entities",
    "MobileBertEmbeddings": "embeds each token with those next to it",
    "MPNetEncoder": "computes its relative positions from the length of the row",
    **dict.fromkeys(("MraEmbeddings", "NystromformerEmbeddings", "YosoEmbeddings"), "counts positions from 2"),
    "PerceiverModel": "attends from latents to the row",
    "ReformerModel": "cuts the row in chunks",
    "SqueezeBertModel": "holds features before tokens",
}


@dataclass(frozen=True)
class DerivedPositions:
    """The positions that a module of RoBERTa or OPT, for example, derives from the row where they are missing."""

    path: str
    from_ids: bool  # counted from the padding id; else from the padding mask, counted from 0

    def differ(self, positions: Tensor | None, places: Tensor, mask: Tensor) -> bool:
        """Return True if positions are missing or places, and the model derives others.  Waits for the device."""
        if positions is not None and not bool((positions == places).all()):
            return False
        if self.from_ids:
            return True
        real = mask.bool()
        return bool(((real.cumsum(-1) - 1 != torch.arange(mask.shape[1], device=mask.device)) & real).any())


def derived_positions(structure: ModelStructure) -> DerivedPositions | None:
    """Return how a model derives missing absolute positions from token ids or padding."""
    for path in dict.fromkeys(parent(path) for path in _position_tables(structure)):
        names = referenced_names(type(structure.tree.modules[path]))
        from_ids = any(name.startswith("create_position_ids") for name in names)
        if from_ids or "cumsum" in names:
            return DerivedPositions(path, from_ids)
    return None


def ignores_position_ids(structure: ModelStructure) -> str | None:
    """Return the table of absolute positions that a model looks up by a row's length alone, as BART's decoder does."""
    tree = structure.tree
    above = [tree.root, *ancestors(tree.root)]
    if any(takes_argument(tree.modules[path], _POSITIONS) for path in above if tree.embedding is not None):
        return None
    return next(_position_tables(structure), None)


def masks_embeddings(structure: ModelStructure) -> str | None:
    """Return the module that multiplies the token embeddings with the padding mask, as DeBERTa's and ESM's do."""
    tree = structure.tree
    above = parent(tree.embedding or "")
    takes = signature(type(tree.modules[above]).forward).parameters if above != tree.root else ()
    return above if any("mask" in name for name in takes) else None


def cuts_padding_mask(structure: ModelStructure) -> bool:
    """Return whether a model cuts the padding mask to its last tokens, one per input embedding."""
    classes = set(map(type, structure.tree.modules.values()))
    return any("create_recurrent_attention_mask" in referenced_names(cls) for cls in classes)


def needs_full_row(structure: ModelStructure) -> str | None:
    """Return the known reason why a module needs the full row, else ``None``."""
    kinds = (type(module).__name__ for module in structure.tree.modules.values())
    return next((f"{kind} {_NEEDS_FULL_ROW[kind]}" for kind in kinds if kind in _NEEDS_FULL_ROW), None)


def _position_tables(structure: ModelStructure) -> Iterator[str]:
    tree = structure.tree
    for path, module in tree.modules.items():
        named = "position" in f"{path.rpartition('.')[2]} {type(module).__name__}".lower()
        inside = is_at_or_below(path, tree.root) and path not in structure.blocks
        in_block = any(above in structure.blocks for above in ancestors(path))
        is_table = tree.is_embedding(path) or tree.has_buffers(path)
        if named and path and inside and not in_block and is_table and "rotary" not in type(module).__name__.lower():
            yield path
