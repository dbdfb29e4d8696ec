"""Save a training state atomically."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import StateEntry, require_memory, state_entries
from fsdp_runtime.sharded.collectives import (
    ModelRanks,
    all_gather_objects,
    mesh_or_world_ranks,
    model_mesh,
    raise_on_all,
    require_equal_on_all,
)
from fsdp_runtime.sharded.paths import require_path
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter, TensorHeader
from fsdp_runtime.sharded.work_directory import work_directory
from fsdp_runtime.training_state.directory import commit
from fsdp_runtime.training_state.manifest import Manifest, StoredChunk, StoredTensor, checksum
from fsdp_runtime.training_state.optimizers import optimizer_metadata, parameter_names
from fsdp_runtime.training_state.rng_state import rng_states
from fsdp_runtime.training_state.safe_pickle import serialize, write_object
from fsdp_runtime.training_state.snapshot import NamedTensor, as_list, chunks_to_write, named_tensors

SHARED_FILE = "shared.pt"


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is a dict, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state."""


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
    """Save model, optimizer, scheduler and RNG states, to resume training on the same or another mesh.

    Collective over the ranks of the model's mesh, for a model of plain tensors over the world; all ranks need access
    to the directory.  Every rank writes its own shards, and replicated tensors are written once.  The new state takes
    effect by one rename when all of it is on the disk.  A process killed at any time leaves either the old or the new
    state complete, and :func:`load_training_state` finds it.  Other jobs may save to the directory meanwhile, as one
    that this job replaces and that still lives: no state is lost or mixed, and the newest is the one committed last.

    Args:
        directory: the same on every rank; created if it does not exist; every state is a directory in it.
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        optimizer: one or several, over the model's parameters.
        step: a number for the directory's name and for ``TrainingState.step``, the same on every rank.
        scheduler: a learning-rate scheduler, or any object with ``state_dict`` and ``load_state_dict``.
        extra: the user's own data, equal on every rank: tensors, numbers, strings, lists, tuples and dicts.
        keep: number of older states to keep in addition to the new one; ``None`` for all.  States that another job
            saved after this one first loaded from or saved to the directory are neither counted nor removed.

    Returns:
        The directory of the new state.

    Raises:
        OptionError: a value cannot be saved in a form that is safe to load, a number is negative, the model is on the
            meta device, an optimizer holds other parameters, or the directory is empty or, as the step, not the same on
            every rank; nothing has been written then.
        WeightsError: safetensors lacks the dtype of a tensor.
        OSError: on the rank that cannot write; older states stay in effect.
        OtherRankError: on the other ranks.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime import save_training_state
        >>> model = nn.Linear(2, 3)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_training_state(directory, model, optimizer, step=7, extra={"tokens": 4096}).name
        'step-00000007'
    """
    if step < 0 or (keep is not None and keep < 0):
        raise OptionError(f"step={step}, keep={keep}: give numbers of at least 0")
    entries = state_entries(model)
    ranks = mesh_or_world_ranks(model, entries)
    optimizers = as_list(optimizer)
    with raise_on_all(ranks) as agreed:
        folder = require_path("directory", directory)
        agreed.value = (os.path.normpath(folder), step)
        tensors = named_tensors(entries, optimizers)
        require_memory({each.name: each.tensor for each in tensors}, "tensors of the training state")
        names = parameter_names(entries, optimizers)
        shared = serialize(
            {
                "optimizers": [optimizer_metadata(each, names) for each in optimizers],
                "scheduler": None if scheduler is None else scheduler.state_dict(),
                "extra": dict(extra or {}),
            }
        )
        own_rng = serialize({"rng": rng_states()})
    for index, name in enumerate(("directory", "step")):
        require_equal_on_all(name, {rank: values[index] for rank, values in agreed.values.items()})
    with work_directory(folder, ranks) as work:
        with raise_on_all(ranks):
            chunks = _write_shards(work, tensors, ranks)
            files = write_object(work, rng_file(ranks.index), own_rng)
            if ranks.is_first:
                files |= write_object(work, SHARED_FILE, shared)
        written = all_gather_objects(ranks, (chunks, files))
        with raise_on_all(ranks) as committed:
            if ranks.is_first:
                _manifest(step, mesh_sizes(entries), tensors, written.values(), ranks).write(work)
                committed.value = commit(work, step, keep)
    final: Path = committed.values[ranks.global_first]
    return final


def rank_file(index: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"rank-{index:05d}.safetensors"


def rng_file(index: int) -> str:
    """Return the name of the file with a rank's RNG states."""
    return f"rank-{index:05d}.rng.pt"


def mesh_sizes(entries: Sequence[StateEntry]) -> dict[str, int]:
    """Return the sizes of the axes of the model's mesh that are larger than 1, by name."""
    mesh = model_mesh(entries)
    if mesh is None:
        return {}
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return {name: size for name, size in zip(names, mesh.shape, strict=True) if size > 1}


@torch.no_grad()
def _write_shards(work: Path, tensors: Sequence[NamedTensor], ranks: ModelRanks) -> dict[str, StoredChunk]:
    """Write this rank's file; return its chunks by the tensor's name."""
    local_chunks = list(chunks_to_write(tensors, ranks))
    file_name = rank_file(ranks.index)
    stored = {}
    headers = [
        TensorHeader(chunk.name, tuple(chunk.local.shape), chunk.local.dtype, chunk.local.nbytes)
        for chunk in local_chunks
    ]
    with SafetensorsWriter(work / file_name, headers) as file:
        for chunk in local_chunks:
            on_cpu = chunk.local.contiguous().cpu()
            file.write(chunk.name, on_cpu)
            start = tuple(side.start for side in chunk.slices)
            stored[chunk.name] = StoredChunk(file_name, start, tuple(on_cpu.shape), checksum(on_cpu))
    return stored


def _manifest(
    step: int,
    mesh: Mapping[str, int],
    tensors: Sequence[NamedTensor],
    written: Iterable[tuple[Mapping[str, StoredChunk], Mapping[str, tuple[int, int]]]],
    ranks: ModelRanks,
) -> Manifest:
    chunks: dict[str, list[StoredChunk]] = {named.name: [] for named in tensors}
    files: dict[str, tuple[int, int]] = {}
    for rank_chunks, rank_files in written:
        files |= rank_files
        for name, chunk in rank_chunks.items():
            chunks[name].append(chunk)
    stored = {
        named.name: StoredTensor(
            tuple(named.tensor.shape), str(named.tensor.dtype).removeprefix("torch."), tuple(chunks[named.name])
        )
        for named in tensors
    }
    return Manifest(step=step, world_size=ranks.count, mesh=mesh, tensors=stored, files=files)
