"""Map names between a model and a checkpoint; choose the stored name of tied tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fsdp_runtime._transformers_compat.checkpoints import is_ignored_on_load, left_out_on_save
from fsdp_runtime._transformers_compat.conversions import (
    Conversion,
    Translation,
    checkpoint_to_model,
    model_to_checkpoint,
)
from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.sharded.chunks import Chunk, identity_chunk
from fsdp_runtime.weights.conversion import TensorSpec, trace_conversion
from fsdp_runtime.weights.hub_checkpoint import HubTensor

Names = Literal["checkpoint", "model"]


@dataclass(frozen=True)
class TensorOrigin:
    """The stored tensors that become one tensor of the model."""

    shape: tuple[int, ...]  # as in the checkpoint
    stored: tuple[str, ...]
    chunks: Sequence[Chunk] | None  # of the stored tensors; ``None``: run the conversion
    conversion: Conversion | None = None  # ``None`` if the tensor is stored without a conversion
    output: str = ""  # the tensor's name among the conversion's outputs


@dataclass(frozen=True)
class WeightMap:
    """A checkpoint's tensors, matched with a model's tensors."""

    by_model_name: Mapping[str, TensorOrigin]
    unexpected: Sequence[str]  # names in the checkpoint that the model lacks
    rules: list[Any] | None  # the applied renamings and conversions, as transformers' objects

    def name_of(self, entry: StateEntry) -> str | None:
        """Return the entry's name that the checkpoint fills, or ``None`` if the checkpoint lacks the tensor."""
        return next((name for name in entry.names if name in self.by_model_name), None)


def map_weights(
    model: nn.Module, entries: Sequence[StateEntry], stored: Mapping[str, HubTensor], prefix: str = ""
) -> WeightMap:
    """Match a checkpoint's tensors with the tensors of the module at ``prefix``, under their names in the model."""
    model, start = model.get_submodule(prefix), f"{prefix}." if prefix else ""
    known = {name.removeprefix(start) for entry in entries for name in entry.names if name.startswith(start)}
    is_transformers = is_transformers_model(model)
    mapping = Translation({name: name for name in stored}, ())
    if is_transformers:
        mapping = checkpoint_to_model(model, stored, known)
    origins = {
        start + target: TensorOrigin(stored[name].shape, (name,), [identity_chunk(name, stored[name].shape)])
        for name, target in mapping.renamed.items()
        if target in known
    }
    specs = {name: TensorSpec(tensor.shape, torch.float32) for name, tensor in stored.items()}
    unexpected = {name: target for name, target in mapping.renamed.items() if target not in known}
    for conversion in mapping.conversions:
        for target, result in trace_conversion(conversion, specs).items():
            chunks = result.chunks
            used = conversion.sources if chunks is None else tuple(dict.fromkeys(chunk.source for chunk in chunks))
            origins[start + target] = TensorOrigin(result.shape, used, chunks, conversion, target)
    reported = [n for n, target in unexpected.items() if not (is_transformers and is_ignored_on_load(model, target))]
    return WeightMap(origins, reported, mapping.rules if is_transformers else None)


def exported_names(
    model: nn.Module, entries: Sequence[StateEntry], names: Names
) -> tuple[dict[str, Tensor], Translation]:
    """Return the tensors of an export by the model's names, and the renamings and conversions of the export."""
    # A tied tensor is saved once if the model's class declares the tie: transformers then ties it again on load. A
    # tensor shared without a declaration is saved under all its names.
    if names not in get_args(Names):
        raise OptionError(f"names={names!r}: write 'checkpoint' or 'model'")
    is_transformers = is_transformers_model(model)
    aliases, ignored = left_out_on_save(model) if is_transformers else (set(), set())
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        saved = tuple(name for name in entry.names if name not in aliases) or entry.names[:1]
        tensors.update(
            (name, entry.tensor) for name in (saved if is_transformers else saved[:1]) if name not in ignored
        )
    if is_transformers and names == "checkpoint":
        return tensors, model_to_checkpoint(model, tensors)
    return tensors, Translation({name: name for name in tensors}, ())
