"""Saving a training state, whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import entries
from fsdp_runtime.sharded.collectives import Ranks, all_or_none, mesh_of, ranks_of, ranks_of_world, tell_all
from fsdp_runtime.sharded.safetensors_io import Planned, SafetensorsFile
from fsdp_runtime.training_state.directory import commit, work_folder
from fsdp_runtime.training_state.manifest import Manifest, StoredPiece, StoredTensor, checksum
from fsdp_runtime.training_state.optimizers import description, parameter_names
from fsdp_runtime.training_state.rng_state import random_states
from fsdp_runtime.training_state.safe_pickle import encoded, write_object
from fsdp_runtime.training_state.snapshot import Named, as_list, named_tensors, own_boxes

SHARED_FILE = "shared.pt"


class Stateful(Protocol):
    """Anything whose state is a dict, as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state over."""


def save_training_state(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    scheduler: Stateful | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Save all that is needed to resume training, here or on another mesh.

    Collective over the ranks of the model's mesh, for a model of plain tensors over the world; the directory must be
    one that all of them see.  Every rank writes its own shards, copies are written once.  The new state takes effect
    by one rename when all of it is on the disk, so a process killed at any moment leaves the old one or the new one
    whole, and ``load_training_state`` finds it.

    Args:
        directory: made if it is not there; every state has a folder in it.
        model: plain, split over ``tp``, sharded by FSDP2, or both.
        optimizer: one or several, over the model's parameters.
        step: a number for the folder's name and for ``TrainingState.step``.
        scheduler: a learning-rate scheduler, or anything with its two methods.
        extra: the user's own data, the same on every rank: tensors, numbers, strings, lists, tuples and dicts.
        keep: how many older states stay beside the new one; ``None`` for all.

    Returns:
        The folder of the new state.

    Raises:
        OptionError: something cannot be saved so that it can be loaded safely; nothing has been written then.
        WeightsError: a dtype that safetensors does not have.
        OSError: on the rank that cannot write; the directory's old states are in force then.
        OtherRankError: on the other ranks.
    """
    if step < 0 or (keep is not None and keep < 0):
        raise OptionError(f"step={step}, keep={keep}: give numbers from 0 on")
    ranks = ranks_of(model)
    if not ranks.groups:
        ranks = ranks_of_world()
    optimizers = as_list(optimizer)
    with all_or_none(ranks):
        tensors = named_tensors(model, optimizers)
        names = parameter_names(entries(model), optimizers)
        shared = encoded(
            {
                "optimizers": [description(each, names) for each in optimizers],
                "scheduler": None if scheduler is None else scheduler.state_dict(),
                "extra": dict(extra or {}),
            }
        )
        own_random = encoded({"random": random_states()})
    with _work_folder(Path(directory), ranks) as work:
        with all_or_none(ranks):
            pieces = _write_own(work, tensors, ranks)
            files = write_object(work, random_file(ranks.index), own_random)
            if ranks.is_first:
                files |= write_object(work, SHARED_FILE, shared)
        written = tell_all(ranks, (pieces, files))
        final = None
        with all_or_none(ranks):
            if ranks.is_first:
                _manifest(step, model, tensors, written.values(), ranks).write(work)
                final = commit(work, step, keep)
    return _from_first(ranks, final)


def rank_file(index: int) -> str:
    """The file with a rank's tensors."""
    return f"rank-{index:05d}.safetensors"


def random_file(index: int) -> str:
    """The file with the states of a rank's random number generators."""
    return f"rank-{index:05d}.random.pt"


def mesh_sizes(model: nn.Module) -> dict[str, int]:
    """The axes of the model's mesh that are larger than 1, by name."""
    mesh = mesh_of(model)
    if mesh is None:
        return {}
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return {name: size for name, size in zip(names, mesh.shape, strict=True) if size > 1}


@contextmanager
def _work_folder(directory: Path, ranks: Ranks) -> Iterator[Path]:
    """The folder that all ranks write into, made by the first one and gone afterwards unless it was committed."""
    made = None
    try:
        with all_or_none(ranks):
            if ranks.is_first:
                made = work_folder(directory)
        yield _from_first(ranks, made)
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _from_first(ranks: Ranks, path: Path | None) -> Path:
    """What the first rank says, on every rank."""
    found: Path = tell_all(ranks, path)[ranks.first]
    return found


@torch.no_grad()
def _write_own(work: Path, tensors: Sequence[Named], ranks: Ranks) -> dict[str, StoredPiece]:
    """Write this rank's file; what is in it by the tensor's name."""
    own = list(own_boxes(tensors, ranks))
    name = rank_file(ranks.index)
    pieces = {}
    planned = [Planned(part.name, tuple(part.local.shape), part.local.dtype, part.local.nbytes) for part in own]
    with SafetensorsFile(work / name, planned) as file:
        for part in own:
            host = part.local.contiguous().cpu()
            file.write(part.name, host)
            start = tuple(side.start for side in part.box)
            pieces[part.name] = StoredPiece(name, start, tuple(host.shape), checksum(host))
    return pieces


def _manifest(step: int, model: nn.Module, tensors: Sequence[Named], written: Any, ranks: Ranks) -> Manifest:
    pieces: dict[str, list[StoredPiece]] = {named.name: [] for named in tensors}
    files: dict[str, tuple[int, int]] = {}
    for theirs, other_files in written:
        files |= other_files
        for name, piece in theirs.items():
            pieces[name].append(piece)
    stored = {
        named.name: StoredTensor(
            tuple(named.tensor.shape), str(named.tensor.dtype).removeprefix("torch."), tuple(pieces[named.name])
        )
        for named in tensors
    }
    return Manifest(step=step, world_size=ranks.count, mesh=mesh_sizes(model), tensors=stored, files=files)
