"""Save a training state atomically: each rank's chunks of tensors, and all other values."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.generators import rng_states
from fsdp_runtime.model.state import StateEntry, require_memory
from fsdp_runtime.sharded.async_saves import HostStaging, SaveFuture, save_in_thread, wait_for_running
from fsdp_runtime.sharded.boxes import local_part, require_layouts, shard_steps
from fsdp_runtime.sharded.collectives import ModelRanks, all_gather_objects, raise_on_all
from fsdp_runtime.sharded.model_state import ModelState
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter, WeightInfo
from fsdp_runtime.sharded.saved_files import require_path, work_directory
from fsdp_runtime.training_state.directory import Manifest, StoredChunk, StoredTensor, commit, serialize, write_object
from fsdp_runtime.training_state.optimizers import (
    as_list,
    merged_metadata,
    optimizer_metadata,
    optimizer_tensors,
    parameter_names,
)
from tp_plans.boxes import Box

if TYPE_CHECKING:  # its package takes long to import
    from torch.distributed.checkpoint.stateful import Stateful

SHARED_FILE = "shared.pt"
#: A rank's chunks, the sizes and checksums of its other files, and the tensors of its stage, by the first rank of each.
_Written = tuple[Mapping[str, StoredChunk], Mapping[str, tuple[int, int]], Mapping[str, StoredTensor]]


class _StateOptions(TypedDict, total=False):
    """Keywords of :func:`save_training_state` that leave its return type unchanged."""

    step: Required[int]
    scheduler: Stateful | None
    extra: Mapping[str, Any] | None
    keep: int | None


@overload
def save_training_state(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = ...,
    *,
    asynchronous: Literal[False] = ...,
    **options: Unpack[_StateOptions],
) -> Path: ...


@overload
def save_training_state(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = ...,
    *,
    asynchronous: Literal[True],
    **options: Unpack[_StateOptions],
) -> SaveFuture[Path]: ...


def save_training_state(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    scheduler: Stateful | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Path | SaveFuture[Path]:
    """Save model, optimizer, scheduler and RNG states, to resume training on the same or another mesh.

    Collective over the model's mesh, or over the world for a model of plain tensors; all ranks need access to the
    directory.  Every rank writes its own shards, and replicated tensors are written once.  The new state takes
    effect by one rename when all files are on the disk.  A process killed at any time leaves either the old or the new
    state complete, and :func:`load_training_state` finds it.  Other jobs may save to the directory meanwhile, such as a
    replaced job that is still alive: no state is lost or mixed, and the state with the last commit is the newest.

    Args:
        directory: created if it does not exist; every state is a directory in it.
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        optimizer: one optimizer or several, over the model's parameters.
        step: a number for the directory's name and for ``TrainingState.step``, the same on every rank.
        scheduler: a learning-rate scheduler, or any object with ``state_dict`` and ``load_state_dict``.
        extra: the user's own data, equal on every rank: tensors, numbers, strings, lists, tuples and dicts.
        keep: number of older states to keep beside the new state; ``None`` for all.  States that another job saved
            after this job's first load from or save to the directory are neither counted nor removed.
        asynchronous: return a :class:`~fsdp_runtime.sharded.async_saves.SaveFuture` once this rank's part is copied to
            host memory; a thread writes the copy while training goes on and changes the tensors.  The saved state is
            the same, bit for bit.  A later save of this process waits until the thread has ended.

    Raises:
        OptionError: a value cannot be saved in a form that is safe to load, a number is negative, the model is on the
            meta device, an optimizer holds other parameters, the directory is empty or not seen by one rank, or the
            directory or an option differs between ranks.  Nothing is written in these cases.
        WeightsError: safetensors lacks the dtype of a tensor.
        OSError: on the rank that cannot write; older states stay in effect.
        OtherRankError: on the other ranks.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import Tensor, nn
        >>> from fsdp_runtime import save_training_state
        >>> model = nn.Linear(2, 3)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_training_state(directory, model, optimizer, step=7, extra={"tokens": 4096}).name
        'step-00000007'
    """
    held = ModelState(model)
    entries, ranks = held.entries, held.writers
    optimizers = as_list(optimizer)
    with raise_on_all(ranks) as agreed:
        if step < 0 or (keep is not None and keep < 0):
            raise OptionError(f"step={step}, keep={keep}: give numbers of at least 0")
        folder = require_path("directory", directory)
        stages = held.stages
        writers = ranks if stages is None else stages.stage
        tensors = named_tensors(entries, optimizers, [] if stages is None else stages.foreign(held.whole))
        require_memory(tensors, "tensors of the training state")
        require_layouts(tensors)
        names = parameter_names(entries, optimizers)
        metadata = [optimizer_metadata(item, names) for item in optimizers]
        state = None if scheduler is None else scheduler.state_dict()
        values: dict[str, Any] = {"optimizers": metadata, "scheduler": state, "extra": dict(extra or {})}
        shared = serialize(values)
        rng = serialize({"rng": rng_states()})
        directory = os.path.normpath(folder)
        agreed.options = {"directory": directory, "step": step, "keep": keep, "asynchronous": asynchronous}
        wait_for_running()
    if stages is not None:
        with raise_on_all(ranks):
            of_stages = all_gather_objects(stages.line, metadata)
            shared = serialize({**values, "optimizers": merged_metadata(of_stages)})
    with ExitStack() as resources:
        work = resources.enter_context(work_directory(folder, ranks))
        with raise_on_all(ranks):
            chunks = list(chunks_to_write(tensors, writers))
            file = work / f"rank-{ranks.index:05d}.safetensors"
            writes = _started_writes(file, chunks, resources, asynchronous=asynchronous)
        objects = {rng_file(ranks.index): rng, **({SHARED_FILE: shared} if ranks.is_first else {})}
        forms = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
        stored = {name: StoredTensor(*form, ()) for name, form in forms.items() if writers.is_first}
        manifest = Manifest(step, ranks.count, mesh_sizes(held.mesh), stored, {})
        finish = partial(_finish, work, manifest, keep, writes, objects)
        return save_in_thread(finish, ranks, list(agreed.values), resources) if asynchronous else finish(ranks)


def _finish(
    work: Path,
    manifest: Manifest,
    keep: int | None,
    writes: Callable[[], dict[str, StoredChunk]],
    objects: Mapping[str, bytes],
    ranks: ModelRanks,
) -> Path:
    """Complete this rank's shards and other files; put the state into effect, and return its directory.  Collective."""
    with raise_on_all(ranks) as written:
        chunks, files = writes(), dict[str, tuple[int, int]]()
        for name, content in objects.items():
            files |= write_object(work, name, content)
        written.value = chunks, files, manifest.tensors
    with raise_on_all(ranks) as committed:
        if ranks.is_first:
            _complete(manifest, written.values.values()).write(work)
            committed.value = commit(work, manifest.step, keep)
    final: Path = committed.values[ranks.global_first]
    return final


def _complete(manifest: Manifest, written: Collection[_Written]) -> Manifest:
    chunks: dict[str, list[StoredChunk]] = defaultdict(list)
    for rank_chunks, _, _ in written:
        for name, chunk in rank_chunks.items():
            chunks[name].append(chunk)
    stored = {name: tensor for *_, tensors in written for name, tensor in tensors.items()}
    tensors = {name: replace(tensor, chunks=tuple(chunks[name])) for name, tensor in stored.items()}
    return replace(manifest, tensors=tensors, files={name: entry for _, f, _ in written for name, entry in f.items()})


def rng_file(index: int) -> str:
    """Return the name of the file with a rank's RNG states."""
    return f"rank-{index:05d}.rng.pt"


def mesh_sizes(mesh: DeviceMesh | None) -> dict[str, int]:
    """Return the sizes of the axes of the model's mesh that are larger than 1, by name."""
    if mesh is None:
        return {}
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return {name: size for name, size in zip(names, mesh.shape, strict=True) if size > 1}


def named_tensors(
    entries: Sequence[StateEntry], optimizers: Sequence[Optimizer], skipped: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return every tensor by its name in the manifest, in the same order on all ranks of a stage."""
    if on_meta := [entry.names[0] for entry in entries if entry.tensor.is_meta]:
        raise OptionError(f"{len(on_meta)} tensors are on the meta device, first {on_meta[0]}: load weights first")
    names = parameter_names(entries, optimizers)
    tensors = {f"model/{name}": entry.tensor for entry in entries if (name := entry.names[0]) not in skipped}
    for index, optimizer in enumerate(optimizers):
        for parameter, key, tensor, _ in optimizer_tensors(optimizer, names):
            if parameter not in skipped:
                tensors[f"optimizer/{index}/{parameter}/{key}"] = tensor
    return tensors


def chunks_to_write(tensors: Mapping[str, Tensor], ranks: ModelRanks) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield names, boxes and data of this rank's chunks; over all ranks, every element is written once."""
    for index, (name, tensor) in enumerate(tensors.items()):
        if _writes(tensor, index, ranks):
            local, box = local_part(tensor.detach())
            if local.numel() or not tensor.numel():
                yield name, box, local


def _writes(tensor: Tensor, index: int, ranks: ModelRanks) -> bool:
    """Assign replicated tensors to ranks round-robin, to balance the bytes that they write."""
    if not isinstance(tensor, DTensor):
        return index % ranks.count == ranks.index
    mesh = tensor.device_mesh
    if ranks.global_first not in mesh.mesh:  # another part of the model's mesh holds the same tensor
        return False
    sharded_axes = {step.axis for step in shard_steps(tensor.placements, mesh.shape)}
    replica, replicas = 0, 1
    for axis, coordinate in enumerate(mesh.get_coordinate() or ()):
        if axis not in sharded_axes:
            replica = replica * mesh.shape[axis] + coordinate
            replicas *= mesh.shape[axis]
    return index % replicas == replica


@torch.no_grad()
def _started_writes(
    path: Path, chunks: Sequence[tuple[str, Box, Tensor]], resources: ExitStack, *, asynchronous: bool
) -> Callable[[], dict[str, StoredChunk]]:
    """Write this rank's chunks, or copy them to host memory; return a function that completes the file."""
    headers = [WeightInfo(name, local.dtype, tuple(local.shape)) for name, _, local in chunks]
    staging = HostStaging()
    file = SafetensorsWriter(path, headers, staging=staging if asynchronous else None, with_checksums=True)
    resources.callback(file.close)
    for name, _, local in chunks:
        file.add(name, local)
    staging.synchronize()
    starts = {name: tuple(start for start, _ in box) for name, box, _ in chunks}

    def finish() -> dict[str, StoredChunk]:
        file.finish()
        checksums: Mapping[str, int] = file.checksums or {}
        return {h.name: StoredChunk(file.path.name, starts[h.name], h.shape, checksums.get(h.name, 0)) for h in headers}

    return finish
