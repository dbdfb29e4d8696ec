"""Images, videos and sound under context parallelism: every rank embeds full rows, then continues with its tokens.

The towers run on all media of a row, and their features take the places of placeholder tokens.  The input of
the language model inside is then cut.  A rank computes the gradient of its tokens: the sum over ``cp`` counts it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor, nn

from fsdp_runtime._transformers_compat.models import MEDIA_METHODS
from fsdp_runtime.errors import LayoutError
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.steps.context.outputs import GlobalRows
from tp_plans.model_tree import is_at_or_below

#: Read only to compute positions, and the caller gives the positions.
_FOR_POSITIONS = ("second_per_grid_ts",)
_EMBEDDINGS, _MASK, _FEATURES = "inputs_embeds", "visual_pos_masks", "deepstack_visual_embeds"


@dataclass(eq=False)
class Media:
    """The inputs of a multimodal model's towers, and a forward pre-hook of the language model inside."""

    names: frozenset[str]  # arguments of the towers
    axes: bool  # positions have several axes, set by the media
    rows: GlobalRows | None = None

    def require_positions(self, given: Mapping[str, Any]) -> None:
        """Check that inputs beside media are token ids, with positions of the media's axes."""
        positions = given.get("position_ids")
        if given.get("input_ids") is None:
            raise LayoutError("media beside inputs_embeds: give input_ids: the media replace its placeholder tokens")
        if positions is None or (self.axes and positions.dim() != 3):
            shape = "[axes, batch, length]" if self.axes else "[batch, length]"
            raise LayoutError(
                f"media without position_ids {shape}: compute the positions of the full row, as the model's "
                "get_rope_index does, and give them to SequenceLayout.shard_batch"
            )

    def cut(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the language model's inputs of this rank's tokens."""
        if (rows := self.rows) is None:
            return None
        cut = (_EMBEDDINGS, _MASK, _FEATURES, "position_ids", "attention_mask")
        uncut = [
            name
            for name, value in kwargs.items()
            if isinstance(value, Mapping) or (name not in cut and isinstance(value, (Tensor, list, tuple)))
        ]
        if args or uncut or _EMBEDDINGS not in kwargs:
            raise LayoutError(
                f"{type(module).__name__} is given {', '.join(uncut) or 'inputs by position'} beside embeddings with "
                "media, which are not of this rank's tokens: use cp=1"
            )
        inputs = {**kwargs, _EMBEDDINGS: rows.layout.shard(kwargs[_EMBEDDINGS])}
        if (places := kwargs.get(_MASK)) is not None:
            local_places = inputs[_MASK] = rows.layout.shard(places)
            numbers = rows.layout.shard((places.flatten().cumsum(0) - 1).view_as(places))[local_places]
            inputs[_FEATURES] = [features.index_select(0, numbers) for features in kwargs[_FEATURES]]
        return args, inputs


def media_of(model: nn.Module, structure: ModelStructure) -> Media | None:
    """Return the inputs of a transformers model for towers beside its language model, ``None`` without towers."""
    root = structure.tree.root
    owners = [
        (module, getattr(module, method))
        for path, module in model.named_modules()
        for method in MEDIA_METHODS.values()
        if path != root and is_at_or_below(root, path) and callable(getattr(module, method, None))
    ]
    names = {name for _, method in owners for name in signature(method).parameters}
    axes = any(hasattr(owner, "get_rope_index") for owner, _ in owners)
    return Media(frozenset({*names, *_FOR_POSITIONS}), axes) if owners else None
