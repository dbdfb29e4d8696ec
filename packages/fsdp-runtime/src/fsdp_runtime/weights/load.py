"""Loading a Hugging Face checkpoint into a sharded model, every rank its own slices."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime import _transformers_compat as transformers_compat
from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._transformers_compat import Conversion
from fsdp_runtime.errors import MismatchError
from fsdp_runtime.model.materialize import materialize
from fsdp_runtime.model.state import Entry, require_plain
from fsdp_runtime.sharded.chunks import Read, fill, whole
from fsdp_runtime.sharded.collectives import all_or_none, ranks_of
from fsdp_runtime.weights.adapters import base_entries, require_real_adapters
from fsdp_runtime.weights.hub_checkpoint import Checkpoint, StoredTensor
from fsdp_runtime.weights.naming import Origin, Sources, sources

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What one rank loaded.

    Args:
        tensors: how many of the model's tensors, tied ones counted once.
        bytes_read: bytes of tensors that this rank read from the files.
        unexpected: names in the checkpoint that the model does not have.
    """

    tensors: int
    bytes_read: int
    unexpected: tuple[str, ...]


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    strict: bool = False,
) -> LoadReport:
    """Load a Hugging Face safetensors checkpoint into a model, in place.

    Every rank opens the files itself and reads only what it holds, also of tensors that the model has fused or merged
    (experts, say); only where a conversion does more than to put boxes together does it read them whole.  A model
    on the meta device is materialised first.  Values are converted to the dtype of the parameter.  Collective where
    the model is on a mesh, so that a rank that cannot read ends all of them.

    Args:
        model: plain, split over ``tp``, sharded by FSDP2, or both; FSDP2's gathered parameters are dropped.
        path: a directory, a safetensors file, or a hub id (see :class:`Checkpoint`).
        device: where to materialise, see :func:`materialize`.
        strict: make tensors that the model lacks an error; they are listed in a warning otherwise.

    Returns:
        What this rank read.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt.
        MismatchError: tensors are missing or of another shape, all listed.
        ConversionError: tensors that are to be fused, merged or cut to fit the model do not fit together, or the
            model's weights are quantised.
        MetaBufferError: a buffer on the meta device that nothing computes.
        OtherRankError: another rank raised one of these.

    All but a failure in the middle of a file are raised on every rank before any parameter changes.
    """
    ranks = ranks_of(model)
    with all_or_none(ranks):
        checkpoint = Checkpoint(path)
    with checkpoint:
        with all_or_none(ranks):
            chosen = _chosen(model, checkpoint, strict=strict, warn=ranks.is_first)
            materialize(model, device)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        with all_or_none(ranks):
            loaded = base_entries(model)
            converter = _Converter(checkpoint)
            for entry in loaded:
                name = _loaded_name(entry, chosen)
                origin = chosen.by_model_name[name]
                if origin.pieces is not None:
                    fill(entry.tensor, origin.pieces, checkpoint.read)
                else:
                    fill(entry.tensor, [whole(name, origin.shape)], converter.reader(origin))
    transformers_compat.remember_rules(base_model(model), chosen.rules)
    return LoadReport(len(loaded), checkpoint.bytes_read, tuple(chosen.unexpected))


def _chosen(model: nn.Module, checkpoint: Checkpoint, *, strict: bool, warn: bool) -> Sources:
    """Where every tensor of the model comes from, checked from headers alone."""
    require_real_adapters(model)
    found = base_entries(model)
    require_plain(found)
    chosen = sources(base_model(model), found, checkpoint.tensors)
    problems = [problem for entry in found if (problem := _problem(entry, chosen, checkpoint)) is not None]
    if problems:
        listed = "\n  ".join(problems)
        raise MismatchError(f"the checkpoint does not fit the model in {len(problems)} tensors:\n  {listed}")
    if chosen.unexpected:
        listed = ", ".join(chosen.unexpected)
        told = f"the checkpoint has {len(chosen.unexpected)} tensors that the model lacks: {listed}"
        if strict:
            raise MismatchError(f"{told}; pass strict=False to load the others")
        if warn:
            logger.warning("%s", told)
    return chosen


def _loaded_name(entry: Entry, chosen: Sources) -> str:
    return next(name for name in entry.names if name in chosen.by_model_name)


def _problem(entry: Entry, chosen: Sources, checkpoint: Checkpoint) -> str | None:
    name = next((name for name in entry.names if name in chosen.by_model_name), None)
    shape = tuple(entry.tensor.shape)
    if name is None:
        return f"{' = '.join(entry.names)}: missing; the model has shape {shape}"
    origin = chosen.by_model_name[name]
    stored = [checkpoint.tensors[part] for part in origin.stored]
    if origin.stored == (name,):
        told = name
    else:
        told = f"{name} (stored as {', '.join(origin.stored[:2])}{', ...' * (len(origin.stored) > 2)})"
    files = " and ".join(sorted({str(part.file) for part in stored}))
    if origin.shape != shape:
        return f"{told}: shape {origin.shape} in {files}, {shape} in the model"
    if entry.tensor.is_floating_point() and (quantized := {part.dtype for part in stored if _is_quantized(part)}):
        return (
            f"{told}: {', '.join(sorted(quantized))} in {files}, which takes scales to become {entry.tensor.dtype}: "
            "dequantize the checkpoint first"
        )
    return None


def _is_quantized(stored: StoredTensor) -> bool:
    return stored.dtype not in ("F64", "F32", "F16", "BF16")


class _Converter:
    """Reads what a conversion makes of whole tensors; keeps the last one's results, since neighbours share them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._last: Conversion | None = None
        self._made: dict[str, Tensor] = {}

    def reader(self, origin: Origin) -> Read:
        """What reads boxes of the tensors that a conversion makes."""
        if self._last is not origin.conversion and origin.conversion is not None:
            self._made.clear()
            stored = {name: self._checkpoint.read(name, ()) for name in origin.conversion.sources}
            self._last, self._made = origin.conversion, origin.conversion.run(stored)
        return lambda name, box: self._made[name][box]
