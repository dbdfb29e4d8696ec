"""The checkpoint of a load, matched with a model: it refuses other models, and fills the model's tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fsdp_runtime._transformers_compat.conversions import Conversion
from fsdp_runtime.errors import MismatchError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.sharded.chunks import (
    Chunk,
    ReadBox,
    fill_from,
    fill_local,
    identity_chunk,
    local_part,
    read_box,
    slices_of,
)
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint
from fsdp_runtime.weights.naming import map_weights
from fsdp_runtime.weights.new_modules import deviation, how_to_load, initial_value
from fsdp_runtime.weights.quantize.packed import fill_packed, packed_weight
from tp_plans.boxes import split_box

logger = logging.getLogger(__name__)

#: Dtypes of floating-point weights that are not quantized.
_FLOATING = {"F64", "F32", "F16", "BF16"}
#: Elements of a tied tensor that are compared at a time.
_COMPARED = 2**24


class StoredSource:
    """The tensors of a checkpoint under the names of a model, with initial values for new modules."""

    def __init__(
        self,
        checkpoint: HubCheckpoint,
        model: nn.Module,
        entries: Sequence[StateEntry],
        new: Mapping[str, float],
        prefix: str,
    ) -> None:
        self._checkpoint, self._model, self._entries, self._new = checkpoint, model, entries, new
        self.weights = map_weights(model, entries, checkpoint.tensors, prefix)
        self._last: Conversion | None = None
        self._outputs: dict[str, Tensor] = {}  # of the last conversion: neighbouring tensors share a conversion

    def require_fit(self, *, strict: bool) -> None:
        """Refuse a checkpoint that does not fit the model, from headers only; warn of other tensors."""
        lacking = [entry.names[0] for entry in self._entries if self.weights.name_of(entry) is None]
        problems = {}
        for entry in self._entries:
            is_drawn = deviation(entry, self._new) is not None and packed_weight(entry) is None
            if (problem := self._problem(entry)) and not (entry.names[0] in lacking and is_drawn):
                problems[entry.names[0]] = problem
        if problems:
            listed = "\n  ".join(problems.values())
            missing = [name for name in problems if name in lacking]
            fix = how_to_load(self._model, self._entries, missing, self._checkpoint.tensors, self._new)
            raise MismatchError(f"the checkpoint does not fit the model in {len(problems)} tensors:\n  {listed}{fix}")
        if lacking:
            logger.warning("the checkpoint lacks %s: initial values are drawn", ", ".join(lacking))
        if unexpected := self.weights.unexpected:
            message = f"the checkpoint has {len(unexpected)} tensors that the model lacks: {', '.join(unexpected)}"
            if strict:
                raise MismatchError(f"{message}; pass strict=False to load the others")
            logger.warning("%s", message)

    def _problem(self, entry: StateEntry) -> str:
        """Return the difference between an entry's header in the checkpoint and the model; empty without any."""
        packed, name = packed_weight(entry), self.weights.name_of(entry)
        shape = tuple(entry.tensor.shape) if packed is None else packed.shape
        if name is None:
            return f"{' = '.join(entry.names)}: missing; the model has shape {shape}"
        origin = self.weights.by_model_name[name]
        stored = [self._checkpoint.tensors[part] for part in origin.stored]
        more = ", ..." * (len(origin.stored) > 2)
        label = name if origin.stored == (name,) else f"{name} (stored as {', '.join(origin.stored[:2])}{more})"
        if packed is not None:
            for weight in filter(None, map(self._checkpoint.stored.get, origin.stored)):
                weight.require_blocks(packed.format)
        files = " and ".join(sorted({str(part.file) for part in stored}))
        if origin.shape != shape:
            return f"{label}: shape {origin.shape} in {files}, {shape} in the model"
        dtype = entry.tensor.dtype if packed is None else packed.dtype
        if dtype.is_floating_point and (quantized := {part.dtype for part in stored} - _FLOATING):
            return (
                f"{label}: {', '.join(sorted(quantized))} in {files} needs scales to be converted to {dtype}: "
                "dequantize the checkpoint first"
            )
        return ""

    def fill(self, entry: StateEntry) -> None:
        """Fill this rank's shard of an entry with stored values, or with initial values."""
        name, packed = self.weights.name_of(entry), packed_weight(entry)
        if name is None:
            fill_from(entry.tensor, initial_value(self._model, entry, self._new))
        elif packed is not None:
            fill_packed(entry.tensor, packed, *self._chunks(name), self._checkpoint.read_codes)
        else:
            fill_local(entry.tensor, *self._chunks(name))

    def differing_ties(self, entries: Sequence[StateEntry]) -> Iterator[tuple[str, str, str]]:
        """Yield two names and their difference for each tied tensor with unequal values in this rank's slices."""
        origins = self.weights.by_model_name
        for entry in entries:
            first, *others = [name for name in entry.names if name in origins] or [""]
            for other in others:
                shape, other_shape = (origins[name].shape for name in (first, other))
                if shape != other_shape:
                    yield first, other, f"shapes {shape} and {other_shape}"
                    continue
                for box in split_box(local_part(entry.tensor)[1], _COMPARED):
                    parts = (read_box(box, entry.tensor.dtype, *self._chunks(name)) for name in (first, other))
                    if not torch.equal(*(part.reshape(-1).view(torch.uint8) for part in parts)):
                        yield first, other, "other values"
                        break

    def _chunks(self, name: str) -> tuple[Sequence[Chunk], ReadBox]:
        """Return a model tensor's source chunks, and the function that reads them; conversions run on full tensors."""
        origin = self.weights.by_model_name[name]
        if origin.chunks is not None:
            return origin.chunks, self._checkpoint.read
        if self._last is not origin.conversion and origin.conversion is not None:
            self._outputs.clear()
            inputs = {name: self._checkpoint.read(name) for name in origin.conversion.sources}
            self._last, self._outputs = origin.conversion, origin.conversion.run(inputs)
        return [identity_chunk(origin.output, origin.shape)], lambda name, box: self._outputs[name][slices_of(box)]


def require_equal_ties(differing: Sequence[tuple[str, str, str]]) -> None:
    """Refuse a checkpoint with two different tensors for one tied tensor; the same error on every rank."""
    if differing:
        listed = "\n  ".join(f"{first} and {other}: {why}" for first, other, why in sorted(set(differing)))
        raise MismatchError(
            "the model ties tensors that differ in the checkpoint: build the model from a config with "
            f"tie_word_embeddings=False, or remove one of the two from the checkpoint\n  {listed}"
        )
