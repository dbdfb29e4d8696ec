"""Load a Hugging Face checkpoint into a sharded model; every rank reads its own slices."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_runtime import _transformers_compat as transformers_compat
from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._transformers_compat import Conversion
from fsdp_runtime.errors import MismatchError
from fsdp_runtime.model.materialize import materialize_entries
from fsdp_runtime.model.state import StateEntry, refresh_buffers, require_unquantized, reshard_all, state_entries
from fsdp_runtime.sharded.chunks import ReadSlices, fill_local, identity_chunk
from fsdp_runtime.sharded.collectives import mesh_ranks, raise_on_all
from fsdp_runtime.weights.adapters import base_state_entries, require_materialized_adapters
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint, HubTensor
from fsdp_runtime.weights.naming import TensorOrigin, WeightMap, map_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """Result of :func:`load_weights` on one rank.

    Args:
        tensors: number of the model's tensors that were loaded, tied ones counted once.
        bytes_read: bytes of tensors that this rank read from the files.
        unexpected: names in the checkpoint that the model lacks.
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

    Every rank opens the files itself and reads only the slices of its shards, also of tensors that the model fuses or
    merges (such as experts); a conversion that does more than rearrange slices reads full tensors.  A model on the meta
    device is materialized first.  Values are converted to the parameter's dtype.  Collective over the model's mesh:
    a rank that cannot read makes all ranks raise.

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both; parameters that FSDP2 holds gathered are freed.
        path: a directory with ``model.safetensors`` or ``model.safetensors.index.json``, one safetensors file, or a
            hub id (resolved by ``huggingface_hub`` if that is installed, from its local cache first).
        device: the device to materialize on, by default the current device of the mesh's type; see
            :func:`materialize`.
        strict: raise if the checkpoint has tensors that the model lacks; otherwise they are listed in a warning.

    Returns:
        The number of tensors loaded, the bytes that this rank read, and the names that the model lacks.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt.
        MismatchError: tensors are missing or of another shape, all listed.
        ConversionError: tensors to be fused, merged or split for the model do not fit together, or the model's weights
            are quantized.
        MetaBufferError: a buffer is on the meta device and no module computes it.
        OtherRankError: another rank raised one of these.

    All errors are raised on every rank before any parameter changes, except a read error in the middle of a file.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from fsdp_runtime import load_weights, save_weights
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_weights(nn.Linear(2, 3), directory)
        ...     load_weights(nn.Linear(2, 3), directory)
        LoadReport(tensors=2, bytes_read=36, unexpected=())
    """
    entries = state_entries(model)
    ranks = mesh_ranks(entries)
    with raise_on_all(ranks):
        checkpoint = HubCheckpoint(path)
    with checkpoint:
        with raise_on_all(ranks):
            base_entries = base_state_entries(model, entries)
            weights = _match(model, base_entries, checkpoint, strict=strict, warn=ranks.is_first)
            materialize_entries(model, entries, device)
        reshard_all(model)
        with raise_on_all(ranks):
            converter = _Converter(checkpoint)
            for entry in refresh_buffers(base_entries):
                name = next(name for name in entry.names if name in weights.by_model_name)
                origin = weights.by_model_name[name]
                if origin.chunks is not None:
                    fill_local(entry.tensor, origin.chunks, checkpoint.read)
                else:
                    fill_local(entry.tensor, [identity_chunk(name, origin.shape)], converter.reader(origin))
    transformers_compat.remember_rules(base_model(model), weights.rules)
    return LoadReport(len(base_entries), checkpoint.bytes_read, tuple(weights.unexpected))


def _match(
    model: nn.Module, entries: Sequence[StateEntry], checkpoint: HubCheckpoint, *, strict: bool, warn: bool
) -> WeightMap:
    """Return the origin of every tensor of the model, checked from headers alone."""
    require_materialized_adapters(model)
    require_unquantized(entries)
    weights = map_weights(base_model(model), entries, checkpoint.tensors)
    problems = [problem for entry in entries if (problem := _problem(entry, weights, checkpoint)) is not None]
    if problems:
        listed = "\n  ".join(problems)
        raise MismatchError(f"the checkpoint does not fit the model in {len(problems)} tensors:\n  {listed}")
    if weights.unexpected:
        listed = ", ".join(weights.unexpected)
        message = f"the checkpoint has {len(weights.unexpected)} tensors that the model lacks: {listed}"
        if strict:
            raise MismatchError(f"{message}; pass strict=False to load the others")
        if warn:
            logger.warning("%s", message)
    return weights


def _problem(entry: StateEntry, weights: WeightMap, checkpoint: HubCheckpoint) -> str | None:
    name = next((name for name in entry.names if name in weights.by_model_name), None)
    shape = tuple(entry.tensor.shape)
    if name is None:
        return f"{' = '.join(entry.names)}: missing; the model has shape {shape}"
    origin = weights.by_model_name[name]
    stored = [checkpoint.tensors[part] for part in origin.stored]
    if origin.stored == (name,):
        label = name
    else:
        label = f"{name} (stored as {', '.join(origin.stored[:2])}{', ...' * (len(origin.stored) > 2)})"
    files = " and ".join(sorted({str(part.file) for part in stored}))
    if origin.shape != shape:
        return f"{label}: shape {origin.shape} in {files}, {shape} in the model"
    if entry.tensor.is_floating_point() and (quantized := {part.dtype for part in stored if _is_quantized(part)}):
        return (
            f"{label}: {', '.join(sorted(quantized))} in {files} needs scales to be converted to {entry.tensor.dtype}: "
            "dequantize the checkpoint first"
        )
    return None


def _is_quantized(stored: HubTensor) -> bool:
    return stored.dtype not in ("F64", "F32", "F16", "BF16")


class _Converter:
    """Run conversions on full tensors; keeps the last one's outputs, because neighbouring tensors share them."""

    def __init__(self, checkpoint: HubCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._last: Conversion | None = None
        self._outputs: dict[str, Tensor] = {}

    def reader(self, origin: TensorOrigin) -> ReadSlices:
        """Return a function that reads slices of the conversion's outputs."""
        if self._last is not origin.conversion and origin.conversion is not None:
            self._outputs.clear()
            inputs = {name: self._checkpoint.read(name) for name in origin.conversion.sources}
            self._last, self._outputs = origin.conversion, origin.conversion.run(inputs)
        return lambda name, slices: self._outputs[name][slices]
