"""Resume from a training state, on the saved mesh or another mesh."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_runtime.errors import CheckpointError, MismatchError
from fsdp_runtime.model.generators import require_rng_states, set_rng_states
from fsdp_runtime.model.inference_mode import leave_inference_mode
from fsdp_runtime.model.materialize import materialize_entries
from fsdp_runtime.model.pretrained_source import adopt, settings_at_source, source_folder
from fsdp_runtime.model.state import StateEntry, refresh_buffers, reshard_all
from fsdp_runtime.sharded.boxes import fill_local, identity_chunk, require_layouts
from fsdp_runtime.sharded.collectives import first_rank_speaks, raise_on_all
from fsdp_runtime.sharded.model_state import ModelState
from fsdp_runtime.sharded.safetensors_io import SafetensorsReader, memory_of
from fsdp_runtime.sharded.saved_files import require_path
from fsdp_runtime.training_state.directory import (
    MANIFEST,
    Manifest,
    StoredTensor,
    newest_state,
    read_manifest,
    read_object,
)
from fsdp_runtime.training_state.optimizers import (
    as_list,
    of_parameters,
    parameter_names,
    require_same_optimizer,
    require_saved_optimizer,
    restore_optimizer,
)
from fsdp_runtime.training_state.save import SHARED_FILE, mesh_sizes, rng_file
from tp_plans.boxes import Box

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

logger = logging.getLogger(__name__)
#: Types of the values in the file of non-tensor values, by key.
_SHARED: Mapping[str, Any] = {"optimizers": list, "scheduler": dict | None, "extra": dict}


@dataclass(frozen=True)
class TrainingState:
    """Result of :func:`load_training_state`: the values outside model, optimizer and scheduler."""

    folder: Path  # the directory of the state
    step: int  # the step given at the save
    extra: dict[str, Any]  # the user's own data
    # whether the random number generators were restored.  They are unchanged if the mesh differs from the saved mesh in
    # axes or sizes
    rng_restored: bool


def load_training_state(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Stateful | None = None,
    device: torch.device | str | None = None,
) -> TrainingState:
    """Load a state of :func:`save_training_state` in place; each rank reads its own shards.

    On the same mesh, training continues bit for bit as if it had not stopped.  The ranks share the check of all
    checksums.  Collective over the model's mesh, or over the world for a model of plain tensors.

    Args:
        directory: the directory of all states, to load the newest state, or the directory of one state.
        model: on any mesh or none; a model on the meta device is materialized first.
        optimizer: one optimizer or several, of the saved class and with the saved groups of the model's parameters.
            ``None`` leaves saved optimizers unread.
        scheduler: the object for the saved scheduler state; ``None`` leaves that state unread.
        device: the device to materialize on, by default the current device of the mesh's type; see
            :func:`materialize`.

    Raises:
        CheckpointError: a file is missing, truncated, corrupt, written to while it was read, or outside the directory.
        OptionError: the directory is empty, or holds another state on one rank.
        MismatchError: the state does not fit the model or an optimizer; every difference is listed.
        OtherRankError: another rank raised one of these errors.

    Errors are raised on every rank before a tensor changes.  Exceptions: a read error in the middle of a file, and a
    file that is written to during the load.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from fsdp_runtime import load_training_state, save_training_state
        >>> model = nn.Linear(2, 3)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = save_training_state(directory, model, step=7, extra={"tokens": 4096})
        ...     state = load_training_state(directory, model)
        >>> state.step, state.extra, state.rng_restored
        (7, {'tokens': 4096}, True)
    """
    held = ModelState(model)
    entries, ranks = held.entries, held.writers
    optimizers = as_list(optimizer)
    with raise_on_all(ranks) as newest:
        root = require_path("directory", directory)
        newest.value = newest_state(root).relative_to(root)
    folder = root / newest.values[ranks.global_first]  # the same on all ranks, also while another job saves
    with raise_on_all(ranks) as opened:
        manifest, of_manifest = read_manifest(folder)
        reader = _StateReader(folder, manifest)
        opened.options = {"directory: the checksum of the manifest": of_manifest}
    with reader, leave_inference_mode():
        with raise_on_all(ranks) as checked, first_rank_speaks(ranks.groups):
            checked.value = settings_at_source(held.base.module)
            shared = read_object(folder, SHARED_FILE, manifest.files, _SHARED)
            same_mesh = (mesh_sizes(held.mesh), ranks.count) == (dict(manifest.mesh), manifest.world_size)
            rng = read_object(folder, rng_file(ranks.index), manifest.files, {"rng": dict}) if same_mesh else None
            if rng is not None:
                require_rng_states(folder / rng_file(ranks.index), rng["rng"])
            for index, saved in enumerate(shared["optimizers"]):
                require_saved_optimizer(folder / SHARED_FILE, index, saved, manifest.tensors)
            require_layouts({entry.names[0]: entry.tensor for entry in entries})
            whole = held.whole
            absent = {entry.names[0] for entry in whole if entry.is_absent}
            shared["optimizers"] = [of_parameters(saved, absent) for saved in shared["optimizers"]]
            _check(whole, optimizers, scheduler, manifest, shared)
            reader.verify(range(ranks.index, len(manifest.tensors), ranks.count))
        with raise_on_all(ranks):
            materialize_entries(model, entries, device)
            reshard_all(model)
            entries = refresh_buffers(entries)
            for entry in entries:
                reader.fill(f"model/{entry.names[0]}", entry.tensor)
            parameters: dict[str, Tensor] = {entry.names[0]: entry.tensor for entry in entries}
            for index, (optimizer, saved) in enumerate(zip(optimizers, shared["optimizers"], strict=False)):
                for name, empty in restore_optimizer(index, optimizer, parameters, saved, manifest.tensors):
                    reader.fill(name, empty)
            reader.require_unchanged()
    if (settings := checked.values[ranks.global_first]) is not None:
        adopt(held.base.module, source_folder(held.base.module), settings)
    if scheduler is not None:
        scheduler.load_state_dict(shared["scheduler"])
    if rng is not None:
        set_rng_states(rng["rng"])
    elif ranks.is_first:
        logger.warning(
            "%s was saved on %s: the random number generators are not restored", folder, manifest.mesh or "no mesh"
        )
    return TrainingState(folder, manifest.step, shared["extra"], rng is not None)


def _check(
    entries: Sequence[StateEntry],
    optimizers: Sequence[Optimizer],
    scheduler: Stateful | None,
    manifest: Manifest,
    shared: Mapping[str, Any],
) -> None:
    stored = {name.removeprefix("model/"): t for name, t in manifest.tensors.items() if name.startswith("model/")}
    problems = [problem for entry in entries if (problem := _problem(entry, stored.get(entry.names[0]))) is not None]
    known = {entry.names[0] for entry in entries}
    problems += [f"{name}: saved, and not in the model" for name in stored if name not in known]
    if problems:
        listed = "\n  ".join(problems)
        raise MismatchError(f"the training state does not fit the model in {len(problems)} tensors:\n  {listed}")
    if optimizers and len(optimizers) != len(shared["optimizers"]):
        raise MismatchError(
            f"{len(optimizers)} optimizers given, and {len(shared['optimizers'])} were saved: give as many, or none"
        )
    names = parameter_names(entries, optimizers)
    for index, (optimizer, saved) in enumerate(zip(optimizers, shared["optimizers"], strict=False)):
        require_same_optimizer(index, optimizer, names, saved)
    if scheduler is not None and shared["scheduler"] is None:
        raise MismatchError("a scheduler was given, and none was saved: pass scheduler=None")


def _problem(entry: StateEntry, stored: StoredTensor | None) -> str | None:
    name, shape, dtype = entry.names[0], tuple(entry.tensor.shape), str(entry.tensor.dtype).removeprefix("torch.")
    if stored is None:
        return f"{name}: missing; the model has shape {shape}"
    if (stored.shape, stored.dtype) != (shape, dtype):
        return f"{name}: {stored.dtype} of shape {stored.shape} was saved, the model has {dtype} of shape {shape}"
    return None


class _StateReader(SafetensorsReader):
    """Reader of a training state's files; it opens each file at its first use."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        super().__init__("resume from an older state")
        self.manifest = manifest
        self._directory = directory
        self._chunks = {
            name: [replace(identity_chunk(chunk.file, chunk.shape), target=chunk.box) for chunk in stored.chunks]
            for name, stored in manifest.tensors.items()
        }
        needed = {chunk.file for stored in manifest.tensors.values() for chunk in stored.chunks} | set(manifest.files)
        if missing := sorted(name for name in needed if not (directory / name).is_file()):
            raise CheckpointError(f"{directory} lacks {', '.join(missing)}: resume from an older state")
        inside = directory.resolve()
        if outside := sorted(name for name in (MANIFEST, *needed) if (directory / name).resolve().parent != inside):
            raise CheckpointError(
                f"{directory / outside[0]} is a link to a file outside of {directory}: copy the file into it"
            )
        _require_room(directory, manifest)

    def fill(self, name: str, tensor: Tensor) -> None:
        fill_local(tensor, self._chunks[name], lambda file, box: self._read(self._directory / file, name, box))

    def _read(self, file: Path, name: str, box: Box | None = None) -> Tensor:
        tensor = self.read_box(file, name, box)
        if (dtype := str(tensor.dtype).removeprefix("torch.")) != (saved := self.manifest.tensors[name].dtype):
            raise CheckpointError(f"{file}: {name} is {dtype}, and {saved} was saved: resume from an older state")
        return tensor

    def verify(self, indices: Iterable[int]) -> None:
        """Check the checksums of tensors, by index in the manifest."""
        names = list(self.manifest.tensors)
        for name in (names[index] for index in indices):
            for chunk in self.manifest.tensors[name].chunks:
                file = self._directory / chunk.file
                tensor = self._read(file, name)
                if tuple(tensor.shape) != chunk.shape or crc32(memory_of(tensor.contiguous())) != chunk.checksum:
                    raise CheckpointError(f"{file}: {name} differs from the saved values: resume from an older state")


def _require_room(directory: Path, manifest: Manifest) -> None:
    """Raise unless the files are as large as the manifest's tensors: a load allocates as many bytes."""
    nbytes: Counter[str] = Counter()
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            nbytes[chunk.file] += math.prod(chunk.shape) * getattr(torch, tensor.dtype).itemsize
    for name, needed in nbytes.items():
        if (size := (directory / name).stat().st_size) < needed:
            raise CheckpointError(
                f"{directory / name} has {size} bytes, and its tensors {needed}: it is truncated or corrupt; resume "
                "from an older state"
            )
