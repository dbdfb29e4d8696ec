"""Find the model's tensors in a checkpoint, and compare the stored values of tied tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fsdp_runtime._transformers_compat.conversions import Conversion
from fsdp_runtime.errors import MismatchError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.sharded.chunks import Chunk, ReadBox, fill_box, identity_chunk, local_part, slices_of
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint
from fsdp_runtime.weights.naming import WeightMap
from tp_plans.boxes import box_shape, split_box

#: Elements of a tied tensor that are compared at a time.
_COMPARED = 2**24


class ValueSources:
    """Stored chunks of the model's tensors; conversions run on full tensors."""

    def __init__(self, weights: WeightMap, checkpoint: HubCheckpoint) -> None:
        self.weights, self.checkpoint = weights, checkpoint
        self._last: Conversion | None = None
        self._outputs: dict[str, Tensor] = {}  # of the last conversion: neighbouring tensors share a conversion

    def __call__(self, name: str) -> tuple[Sequence[Chunk], ReadBox]:
        """Return a model tensor's source chunks, and the function that reads the chunks."""
        origin = self.weights.by_model_name[name]
        if origin.chunks is not None:
            return origin.chunks, self.checkpoint.read
        if self._last is not origin.conversion and origin.conversion is not None:
            self._outputs.clear()
            inputs = {name: self.checkpoint.read(name) for name in origin.conversion.sources}
            self._last, self._outputs = origin.conversion, origin.conversion.run(inputs)
        return [identity_chunk(name, origin.shape)], lambda name, box: self._outputs[name][slices_of(box)]


def differing_ties(entries: Sequence[StateEntry], sources: ValueSources) -> Iterator[tuple[str, str, str]]:
    """Yield two names and their difference for each tied tensor with unequal stored values in this rank's slices."""
    for entry in entries:
        origins = sources.weights.by_model_name
        first, *others = [name for name in entry.names if name in origins] or [""]
        for other in others:
            shape, other_shape = (origins[name].shape for name in (first, other))
            if shape != other_shape:
                yield first, other, f"shapes {shape} and {other_shape}"
                continue
            for box in split_box(local_part(entry.tensor)[1], _COMPARED):
                parts = []
                for name in (first, other):
                    part = torch.empty(box_shape(box), dtype=entry.tensor.dtype)
                    fill_box(part, box, *sources(name))
                    parts.append(part)
                if not torch.equal(*(part.reshape(-1).view(torch.uint8) for part in parts)):
                    yield first, other, "other values"
                    break


def require_equal_ties(differing: Sequence[tuple[str, str, str]]) -> None:
    """Refuse a checkpoint with two different tensors for one tied tensor; the same error on every rank."""
    if differing:
        listed = "\n  ".join(f"{first} and {other}: {why}" for first, other, why in sorted(set(differing)))
        raise MismatchError(
            "the model ties tensors that differ in the checkpoint: build the model from a config with "
            f"tie_word_embeddings=False, or remove one of the two from the checkpoint\n  {listed}"
        )
