"""Loading a Hugging Face checkpoint into a sharded model, every rank its own slices."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime import _transformers_compat as transformers_compat
from fsdp_runtime.errors import MismatchError
from fsdp_runtime.weights.checkpoint import Checkpoint, StoredTensor
from fsdp_runtime.weights.entries import Entry, entries
from fsdp_runtime.weights.materialize import materialize
from fsdp_runtime.weights.names import Sources, sources
from fsdp_runtime.weights.pieces import fill, whole
from fsdp_runtime.weights.ranks import all_or_none, ranks_of

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

    Every rank opens the files itself and reads only what it holds.  A model on the meta device is materialised
    first.  Values are converted to the dtype of the parameter.  Collective where the model is on a mesh, so that a
    rank that cannot read ends all of them.

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
        ConversionError: tensors would have to be fused or cut to fit.
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
            loaded = entries(model)
            for entry in loaded:
                stored = chosen.by_model_name[_loaded_name(entry, chosen)]
                fill(entry.tensor, [whole(stored, checkpoint.tensors[stored].shape)], checkpoint.read)
    transformers_compat.remember_rules(model, chosen.rules)
    return LoadReport(len(loaded), checkpoint.bytes_read, tuple(chosen.unexpected))


def _chosen(model: nn.Module, checkpoint: Checkpoint, *, strict: bool, warn: bool) -> Sources:
    """Where every tensor of the model comes from, checked from headers alone."""
    found = entries(model)
    chosen = sources(model, found, list(checkpoint.tensors))
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
    stored_name = chosen.by_model_name[name]
    stored = checkpoint.tensors[stored_name]
    told = f"{name}" if stored_name == name else f"{name} (stored as {stored_name})"
    if stored.shape != shape:
        return f"{told}: shape {stored.shape} in {stored.file}, {shape} in the model"
    if entry.tensor.is_floating_point() and _is_quantized(stored):
        return (
            f"{told}: {stored.dtype} in {stored.file}, which takes scales to become {entry.tensor.dtype}: dequantize "
            "the checkpoint first"
        )
    return None


def _is_quantized(stored: StoredTensor) -> bool:
    return stored.dtype not in ("F64", "F32", "F16", "BF16")
