"""Resuming from a training state, on the mesh that it was saved on or another."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from fsdp_runtime.errors import MismatchError
from fsdp_runtime.model.materialize import materialize
from fsdp_runtime.model.state import Entry, entries
from fsdp_runtime.sharded.collectives import Ranks, all_or_none, ranks_of, ranks_of_world
from fsdp_runtime.training_state.directory import newest
from fsdp_runtime.training_state.manifest import Manifest, StoredTensor, read_manifest
from fsdp_runtime.training_state.optimizers import parameter_names, require_same_groups, restore
from fsdp_runtime.training_state.reader import StateReader
from fsdp_runtime.training_state.rng_state import set_random_states
from fsdp_runtime.training_state.safe_pickle import read_object
from fsdp_runtime.training_state.save import SHARED_FILE, Stateful, mesh_sizes, random_file
from fsdp_runtime.training_state.snapshot import as_list

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingState:
    """What was resumed beside model, optimizer and scheduler.

    Args:
        folder: where it was read.
        step: as given when it was saved.
        extra: the user's own data.
        random_restored: whether the random number generators continue where they were; they do on a mesh of the
            same axes and sizes, and are left alone on any other.
    """

    folder: Path
    step: int
    extra: dict[str, Any]
    random_restored: bool


def load_training_state(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Stateful | None = None,
    device: torch.device | str | None = None,
    verify: bool = True,
) -> TrainingState:
    """Load what :func:`save_training_state` saved, in place, each rank reading what it holds.

    On the same mesh training goes on bit by bit as if it had not stopped.  Collective as the save was.

    Args:
        directory: where states were saved, for the newest of them, or the folder of one.
        model: on any mesh or none; on the meta device it is materialised first.
        optimizer: as when saving, over this model's parameters; its groups hold the same parameters.  ``None``
            leaves saved optimizers unread.
        scheduler: as when saving; ``None`` leaves a saved one unread.
        device: where to materialise, see :func:`materialize`.
        verify: check the checksum of every tensor first; the ranks share the reading.

    Returns:
        The step, the user's data, and whether random numbers continue.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt.
        MismatchError: the state is not that of this model or optimizer; every difference is listed.
        OtherRankError: another rank raised one of these.

    All are raised on every rank before anything changes, but for a file that fails while it is read.
    """
    ranks = ranks_of(model)
    if not ranks.groups:
        ranks = ranks_of_world()
    optimizers = as_list(optimizer)
    with all_or_none(ranks):
        folder = newest(Path(directory))
        manifest = read_manifest(folder)
        reader = StateReader(folder, manifest)
    with reader:
        with all_or_none(ranks):
            shared = read_object(folder, SHARED_FILE, manifest.files)
            same_mesh = _is_same_mesh(model, manifest, ranks)
            random = read_object(folder, random_file(ranks.index), manifest.files) if same_mesh else None
            _check(model, optimizers, scheduler, manifest, shared)
            if verify:
                reader.verify(range(ranks.index, len(manifest.tensors), ranks.count))
        with all_or_none(ranks):
            materialize(model, device)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            found = entries(model)
            for entry in found:
                reader.fill(f"model/{entry.names[0]}", entry.tensor)
            _load_optimizers(optimizers, found, shared, reader)
    if scheduler is not None:
        scheduler.load_state_dict(shared["scheduler"])
    if random is not None:
        set_random_states(random["random"])
    elif ranks.is_first:
        logger.warning(
            "%s was saved on %s: random number generators are left as they are", folder, manifest.mesh or "no mesh"
        )
    return TrainingState(folder, manifest.step, shared["extra"], random is not None)


def _is_same_mesh(model: nn.Module, manifest: Manifest, ranks: Ranks) -> bool:
    return (mesh_sizes(model), ranks.count) == (dict(manifest.mesh), manifest.world_size)


def _check(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scheduler: Stateful | None,
    manifest: Manifest,
    shared: Mapping[str, Any],
) -> None:
    """Raise :class:`MismatchError` unless everything that is asked for was saved, and from a model like this one."""
    found = entries(model)
    stored = {name.removeprefix("model/"): t for name, t in manifest.tensors.items() if name.startswith("model/")}
    problems = [problem for entry in found if (problem := _problem(entry, stored.get(entry.names[0]))) is not None]
    known = {entry.names[0] for entry in found}
    problems += [f"{name}: saved, and the model has none" for name in stored if name not in known]
    if problems:
        listed = "\n  ".join(problems)
        raise MismatchError(f"the training state does not fit the model in {len(problems)} tensors:\n  {listed}")
    if optimizers and len(optimizers) != len(shared["optimizers"]):
        raise MismatchError(f"{len(optimizers)} optimizers to resume, and {len(shared['optimizers'])} were saved")
    names = parameter_names(found, optimizers)
    for number, (optimizer, saved) in enumerate(zip(optimizers, shared["optimizers"], strict=False)):
        require_same_groups(number, optimizer, names, saved)
    if scheduler is not None and shared["scheduler"] is None:
        raise MismatchError("a scheduler to resume, and none was saved: pass scheduler=None")


def _problem(entry: Entry, stored: StoredTensor | None) -> str | None:
    name, shape, dtype = entry.names[0], tuple(entry.tensor.shape), str(entry.tensor.dtype).removeprefix("torch.")
    if stored is None:
        return f"{name}: missing; the model has shape {shape}"
    if (stored.shape, stored.dtype) != (shape, dtype):
        return f"{name}: {stored.dtype} of shape {stored.shape} was saved, the model has {dtype} of shape {shape}"
    return None


def _load_optimizers(
    optimizers: Sequence[Optimizer], found: Sequence[Entry], shared: Mapping[str, Any], reader: StateReader
) -> None:
    parameters: dict[str, Tensor] = {entry.names[0]: entry.tensor for entry in found}
    for number, (optimizer, saved) in enumerate(zip(optimizers, shared["optimizers"], strict=False)):
        prefix = f"optimizer/{number}/"
        stored = {
            name.removeprefix(prefix): (tensor.shape, getattr(torch, tensor.dtype))
            for name, tensor in reader.manifest.tensors.items()
            if name.startswith(prefix)
        }
        for name, empty in restore(optimizer, parameters, saved, stored):
            reader.fill(prefix + name, empty)
