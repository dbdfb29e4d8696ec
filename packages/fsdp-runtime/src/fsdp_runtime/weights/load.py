"""Load a Hugging Face checkpoint into a sharded model; each rank reads the slices of its shards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_runtime._transformers_compat.checkpoints import read_generation_settings
from fsdp_runtime._transformers_compat.conversions import remember_rules
from fsdp_runtime.model.inference_mode import leave_inference_mode
from fsdp_runtime.model.materialize import materialize_entries
from fsdp_runtime.model.pretrained_source import adopt, source_folder
from fsdp_runtime.model.state import refresh_buffers, reshard_all
from fsdp_runtime.sharded.boxes import require_plain_shards
from fsdp_runtime.sharded.collectives import first_rank_speaks, raise_on_all
from fsdp_runtime.sharded.model_state import ModelState
from fsdp_runtime.weights.adapters import base_state_entries, require_materialized_adapters
from fsdp_runtime.weights.hub_checkpoint import open_on_all
from fsdp_runtime.weights.quantize.stored import read_stored_weights
from fsdp_runtime.weights.stored_source import StoredSource, require_equal_ties, submodule


@dataclass(frozen=True)
class LoadReport:
    """Result of :func:`load_weights` on one rank."""

    tensors: int  # number of the model's tensors that all ranks loaded, tied tensors counted once
    # bytes of tensors that this rank read from the files; if several ranks of a host read a byte, it comes from the
    # page cache
    bytes_read: int
    unexpected: tuple[str, ...]  # names in the checkpoint that the model lacks


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    strict: bool = False,
    training: bool | None = None,
    new_modules: Mapping[str, float] | None = None,
    prefix: str = "",
) -> LoadReport:
    """Load a Hugging Face safetensors checkpoint into a model, in place.

    Each rank opens the files and reads only the slices of its shards, also for tensors that the model fuses or merges
    (such as experts).  The page cache of a host reads each byte from the disk once.  If a conversion does more than
    rearrange slices, every rank reads its full tensors.  A model on the meta device is materialized first.  Values are
    converted to the parameter's dtype.  Collective over the model's mesh.

    A generative model takes the checkpoint's generation config; the user's settings stay.  :func:`save_weights` copies
    the tokenizer's files from the checkpoint's folder.

    A model of ``from_config`` is in training mode, with dropout active, and a load does not change the mode.
    ``from_pretrained`` returns a model in evaluation mode: pass ``training=False`` for the same.

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both; gathered FSDP2 parameters are resharded.
        path: a directory with ``model.safetensors`` or ``model.safetensors.index.json``, one safetensors file, or a
            hub id (resolved by ``huggingface_hub`` if that is installed, from its local cache first).
        device: the device to materialize on, by default the current device of the mesh's type; see
            :func:`materialize`.
        strict: raise if the checkpoint has tensors that the model lacks; otherwise a warning lists the tensors.
        training: call ``model.train(training)`` after the load; ``None`` leaves the mode.
        new_modules: maps the path of a module that the checkpoint may lack, such as the head of a critic built on a
            language model, to the standard deviation of its random weights.  Norm weights are one, other vectors zero.
            The values depend on the names only, so they are the same on any mesh.
        prefix: path of the submodule to load, such as ``"policy"`` if the language model is ``model.policy``; list
            the modules beside it in ``new_modules``.

    Raises:
        CheckpointError: a file is missing, truncated, corrupt, or outside the directory of the index that names it, or
            another process replaced the checkpoint while ranks opened it, or wrote to its files while they were read.
        OptionError: ``path`` is empty, ``prefix`` or a path in ``new_modules`` names no module, or ``prefix``,
            ``new_modules`` or ``training`` differs between ranks.
        MismatchError: tensors are missing or of another shape; the error lists them, and suggests ``new_modules`` or
            ``prefix`` if that would load the other tensors.  Or the checkpoint has several tensors with different
            values for one tied tensor of the model.
        ConversionError: tensors to be fused, merged or split for the model do not fit together, or the model's weights
            are quantized.
        MetaBufferError: a buffer is on the meta device and no module computes it.
        OtherRankError: another rank raised one of these errors.

    Errors are raised on every rank before any parameter changes.  Exceptions: a read error in the middle of a file,
    and a file that is written to during the load.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from fsdp_runtime import load_weights, save_weights
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = save_weights(nn.Linear(2, 3), directory)
        ...     load_weights(nn.Linear(2, 3), directory)
        LoadReport(tensors=2, bytes_read=36, unexpected=())
    """
    with leave_inference_mode():
        state = ModelState(model)
        ranks = state.ranks
        with raise_on_all(ranks) as step:
            step.options = {"training": training, "new_modules": {**(new_modules or {})}, "prefix": prefix}
            inner: Any = submodule(state.base.module, "prefix", prefix)
            for path_of_new in new_modules or {}:
                submodule(state.base.module, "new_modules", path_of_new)
        checkpoint = open_on_all(path, ranks)
        with checkpoint:
            with raise_on_all(ranks) as matched, first_rank_speaks(ranks.groups):
                read_stored_weights(checkpoint)
                base_entries = base_state_entries(state.base, state.whole)
                own_entries = [entry for entry in base_entries if not entry.is_absent]
                require_materialized_adapters(state.base, state.entries)
                require_plain_shards(own_entries)
                source = StoredSource(checkpoint, state.base.module, base_entries, new_modules or {}, prefix)
                source.require_fit(strict=strict)
                ties = list(source.differing_ties(own_entries))
                folder = checkpoint.folder or source_folder(inner)
                generates = source.weights.rules is not None and inner.can_generate()
                matched.value = ties, read_generation_settings(folder) if folder and generates else None
            require_equal_ties([tie for ties, _ in matched.values.values() for tie in ties])
            with raise_on_all(ranks):
                materialize_entries(model, state.entries, device)
            reshard_all(model)
            present = refresh_buffers(own_entries)
            with raise_on_all(ranks):
                for entry in present:
                    source.fill(entry)
                checkpoint.require_unchanged()
    if source.weights.rules is not None:
        remember_rules(inner, source.weights.rules)
    adopt(inner, folder, matched.values[ranks.global_first][1])
    if training is not None:
        model.train(training)
    return LoadReport(len(base_entries), checkpoint.bytes_read, tuple(source.weights.unexpected))
