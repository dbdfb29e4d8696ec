"""Save a sharded model as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime._transformers_compat.checkpoints import save_config
from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.inference_mode import leave_inference_mode
from fsdp_runtime.model.pretrained_source import generation_config_of, settings_at_source
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.model.unloaded import require_loaded
from fsdp_runtime.sharded.async_saves import IfSaving, SaveFuture, must_refuse, require_none_running, save_in_thread
from fsdp_runtime.sharded.collectives import (
    ModelRanks,
    mesh_or_world_ranks,
    raise_on_all,
    require_equal_on_all,
    required_device,
)
from fsdp_runtime.sharded.file_systems import file_place, may_share_files
from fsdp_runtime.sharded.fsync import (
    freed_in_background,
    fsync_path,
    naming_total,
    naming_write_errors,
    write_and_fsync,
)
from fsdp_runtime.sharded.host_staging import HostStaging, StagedWriter
from fsdp_runtime.sharded.paths import require_path
from fsdp_runtime.sharded.safetensors_io import SafetensorsLayout, SafetensorsWriter
from fsdp_runtime.sharded.work_directory import others_at_work, remove_work, require_seen, work_directory
from fsdp_runtime.weights.companion_files import copy_companions, files_in_order, leave_out_present
from fsdp_runtime.weights.export import ExportedTensor, MergedShards
from fsdp_runtime.weights.file_plan import WriteStep
from fsdp_runtime.weights.hub_checkpoint import INDEX_FILE, SINGLE_FILE
from fsdp_runtime.weights.naming import Names
from fsdp_runtime.weights.quantize.formats import Quantization
from fsdp_runtime.weights.stream import DEFAULT_BUCKET_BYTES, ExportedModel, WeightExport
from fsdp_runtime.weights.write_blocks import BlockWriter, SaveReport
from fsdp_runtime.weights.write_plan import PlannedFile, plan_files, plan_writes, shard_name

_SHARD_FILE = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")

#: Bytes that each rank writes between two exchanges of errors.
_CHECKED_AFTER = 2**28


class _WeightOptions(TypedDict, total=False):
    """Keywords of :func:`save_weights` that leave its return type unchanged."""

    max_shard_bytes: int
    bucket_bytes: int
    dtype: torch.dtype | None
    names: Names
    quantize: Quantization | None
    writers: Literal["all", "one"] | None
    if_saving: IfSaving


@overload
def save_weights(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    asynchronous: Literal[False] = ...,
    **options: Unpack[_WeightOptions],
) -> SaveReport: ...


@overload
def save_weights(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    asynchronous: Literal[True],
    **options: Unpack[_WeightOptions],
) -> SaveFuture[SaveReport]: ...


def save_weights(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    names: Names = "checkpoint",
    quantize: Quantization | None = None,
    writers: Literal["all", "one"] | None = None,
    asynchronous: bool = False,
    if_saving: IfSaving = "wait",
) -> SaveReport | SaveFuture[SaveReport]:
    """Save a model as safetensors, with its configs and the files of the checkpoint that it was loaded from.

    The files are ``config.json``, ``generation_config.json``, the files of the tokenizer and of the processor, and the
    code of a class that was loaded with ``trust_remote_code``.  The checkpoint's folder is the folder that
    :func:`load_weights` or ``from_pretrained`` read.  A tokenizer is not copied if the vocabulary was resized; a
    warning says so.

    Collective: over the ranks of the model's mesh; for a model of plain tensors over the world.  Every rank writes its
    blocks to their places in the files.  Blocks that interleave there, such as the columns of ``tp``, are exchanged
    first, each element once at most, and replicas write a part each.  The first rank writes plain tensors.  Only
    quantized weights and computed outputs of conversions are gathered, a bucket at a time.  Files are written to a
    temporary directory, which all ranks have to see, and then renamed.
    One last rename makes the new weights take effect, so a process killed at any time leaves either the old or the new
    weights complete; the config is renamed just before.  If jobs save to one directory at the same time, the last
    rename takes effect.  Old files are removed after the rename, as the disk may have no room for both:
    :func:`load_weights` then opens the new files; a reader of another library finds a file missing and has to retry.

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        directory: the same on every rank; created if it does not exist; other files in it are kept, and so is a
            tokenizer or a processor that was saved there.
        max_shard_bytes: bytes of a file, as transformers' ``max_shard_size``; a larger tensor has a separate file.
        bucket_bytes: the most bytes that a rank holds for exchanges; also the bytes of full tensors in one gather.
        dtype: round floating-point tensors to this dtype, after adapters were merged, and write it to the config.
            Tensors that ``from_pretrained(dtype=dtype)`` leaves in another dtype, such as routing biases in float32,
            get that dtype; ``None`` keeps the dtype of each tensor.
        names: ``"checkpoint"`` for the names of the Hugging Face checkpoint, ``"model"`` for the model's own.
        quantize: store linear layers in low precision, with their scales, and record this in the config, except layers
            that the model's class keeps in float32; other weights then default to bfloat16.
        writers: with ``"all"`` every rank writes its blocks into every file; with ``"one"`` each file has one writing
            rank, which receives the others' blocks, for file systems where several hosts may not write to one file.
            ``None`` takes ``"all"`` if all ranks are on one host, or the file system is known to keep concurrent writes
            separate (Lustre, GPFS, BeeGFS, Ceph, WekaFS), and ``"one"`` otherwise, as on NFS.
        asynchronous: return once this rank's blocks are exchanged and copied to host memory, as many bytes as it
            writes; a thread writes them while training goes on and changes the weights.
        if_saving: while an asynchronous save of this process is being written, ``"wait"`` until it has ended, or
            ``"raise"`` on all ranks.

    Returns:
        The bytes that this rank wrote, sent, received and held; with ``asynchronous`` a
        :class:`~fsdp_runtime.sharded.async_saves.SaveFuture`: its ``wait()`` returns the bytes and raises the thread's
        errors.

    Raises:
        ConversionError: the model's tensors differ from its class's (``names="model"`` works), or are quantized.
        OptionError: a size is not positive, ``dtype`` not a floating-point dtype, ``quantize`` no ``Quantization``,
            ``names``, ``writers`` or ``if_saving`` unknown, the directory empty or not seen by one rank, an option
            other than ``if_saving`` not the same on every rank, or an earlier save still being written with
            ``if_saving="raise"``.
        ModelError: tensors are on the meta device.
        WeightsError: safetensors lacks the dtype of a tensor.
        OSError: on a rank that cannot write; the directory's old contents stay in effect, unless only the wait for the
            last rename to reach the disk failed.
        OtherRankError: on the other ranks.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torch import nn
        >>> from fsdp_runtime import save_weights
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     report = save_weights(nn.Linear(2, 3), directory)
        ...     [file.name for file in Path(directory).iterdir()], report.bytes_written
        (['model.safetensors'], 36)
    """
    given: dict[str, Any] = {
        "max_shard_bytes": max_shard_bytes,
        "bucket_bytes": bucket_bytes,
        "dtype": dtype,
        "names": names,
        "quantize": quantize,
        "writers": writers,
        "asynchronous": asynchronous,
    }
    entries = state_entries(model)
    ranks = mesh_or_world_ranks(model, entries)
    with raise_on_all(ranks) as step:
        if max_shard_bytes < 1 or bucket_bytes < 1:
            raise OptionError(f"max_shard_bytes={max_shard_bytes}, bucket_bytes={bucket_bytes}: give positive numbers")
        if writers not in (None, "all", "one"):
            raise OptionError(f"writers={writers!r}: write 'all', 'one' or None")
        target = require_path("directory", directory)
        given["directory"] = os.path.normpath(target)
        step.value = given, file_place(target), must_refuse(if_saving)
        require_loaded([entry.names[0] for entry in entries if entry.tensor.is_meta], "save_weights")
        options = WeightExport(dtype=dtype, names=names, quantize=quantize, bucket_bytes=bucket_bytes)
        export = options.prepare(model, entries)
        items = export.tensors
        floating = (item.dtype for item in items if item.dtype.is_floating_point)
        config_dtype = options.exported_dtype or next(floating, torch.get_default_dtype())
    require_equal_on_all({rank: options for rank, (options, _, _) in step.values.items()})
    require_none_running([rank for rank, (_, _, refuses) in step.values.items() if refuses])
    places = {rank: place for rank, (_, place, _) in step.values.items()}
    share = may_share_files(places.values()) if writers is None else writers == "all"
    files = plan_files(export, max_shard_bytes, places, shared=share)
    shards = [each.items for each in files]
    with ExitStack() as resources:
        work = resources.enter_context(work_directory(target, ranks))
        staging = HostStaging() if asynchronous else None
        with leave_inference_mode():
            blocks, on_disk = _write_files(files, export, work, ranks, list(places), bucket_bytes, staging, resources)
        with raise_on_all(ranks):
            if ranks.is_first and is_transformers_model(base_model(model)):
                _save_companions(base_model(model), work, target, config_dtype)
                if quantize is not None:
                    config = json.loads((work / "config.json").read_text())
                    config["quantization_config"] = quantize.config(export.kept_modules)
                    _write_json(work / "config.json", config)
        report = blocks.report
        if staging is not None:
            staging.synchronize()
            report = replace(report, peak_bytes=report.peak_bytes + staging.nbytes)
        finish = partial(_finish, report, on_disk, work, target, shards)
        return save_in_thread(finish, ranks, list(places), resources) if asynchronous else finish(ranks)


def _save_companions(model: nn.Module, work: Path, target: Path, dtype: torch.dtype) -> None:
    """Write the model's configs, and copy the other files of the checkpoint that the model was loaded from."""
    copy_companions(model, work, target)
    with naming_write_errors(work / "config.json"):
        save_config(model, work, dtype, generation_config_of(model, settings_at_source(model)))


def _finish(
    report: SaveReport,
    on_disk: Sequence[Callable[[], None]],
    work: Path,
    target: Path,
    shards: Sequence[Sequence[ExportedTensor]],
    ranks: ModelRanks,
) -> SaveReport:
    """Wait until every rank's files are on the disk, and put them into effect.  Collective."""
    with raise_on_all(ranks):
        for wait in on_disk:
            wait()
    with raise_on_all(ranks):
        if ranks.is_first:
            _commit(work, target, shards)
            remove_work(work)
    return report


def _write_files(
    files: Sequence[PlannedFile],
    export: ExportedModel,
    work: Path,
    ranks: ModelRanks,
    everyone: Sequence[int],
    bucket_bytes: int,
    staging: HostStaging | None,
    resources: ExitStack,
) -> tuple[BlockWriter, list[Callable[[], None]]]:
    """Write or stage this rank's parts of every file; return calls that return once the parts are on the disk."""
    rank, first = everyone[ranks.index], everyone[0]
    with raise_on_all(ranks):
        require_seen(work, ranks)
        layouts = [SafetensorsLayout(each.items) for each in files]
        with naming_total(sum(layout.nbytes for layout in layouts)):
            for each, layout in zip(files, layouts, strict=True):
                if rank == (first if each.writer is None else each.writer):
                    SafetensorsWriter(work / each.name, layout).close()  # its header, and its full size
    blocks = BlockWriter(rank, ranks, bucket_bytes, required_device(ranks.groups) or torch.device("cpu"))
    tensors = _planned(export, everyone, bucket_bytes, files)
    unchecked = 0
    pool = resources.enter_context(ThreadPoolExecutor(1, "fsync"))
    on_disk: list[Callable[[], None]] = []
    for each, layout in zip(files, layouts, strict=True):
        on_file = SafetensorsWriter(work / each.name, layout, create=False)
        file = on_file if staging is None else StagedWriter(on_file, staging)
        for _ in each.items:
            item, steps, sources = next(tensors)
            blocks.add(item, steps, sources, file)
            unchecked += item.nbytes
        blocks.flush()
        completed = partial(_fsync_and_close, file)
        on_disk.append(completed if staging is not None else pool.submit(completed).result)
        if unchecked >= _CHECKED_AFTER * ranks.count:
            unchecked = 0
            with raise_on_all(ranks):
                blocks.raise_error()
    with raise_on_all(ranks):
        blocks.raise_error()
    return blocks, on_disk


def _planned(
    export: ExportedModel, everyone: Sequence[int], bucket_bytes: int, files: Sequence[PlannedFile]
) -> Iterator[tuple[ExportedTensor, Sequence[WriteStep], Mapping[str, Tensor]]]:
    """Yield every exported tensor with its plan and this rank's local tensors.  Collective."""
    for planned in plan_writes(export, everyone, bucket_bytes, files):
        if planned.gathered:
            gathered = export.gather(planned.groups)
            for item, steps in planned.tensors:
                _, tensor = next(gathered)
                yield item, steps, {item.name: tensor}
                del tensor
            next(gathered, None)  # the iterator has to be exhausted
            continue
        (group,) = planned.groups
        local = {name: local_tensor(tensor).detach() for name, tensor in group.sources.items()}
        if group.adapters:
            merged = MergedShards([group])
            merged.refresh()
            local |= merged.local
        for item, steps in planned.tensors:
            yield item, steps, local


def _fsync_and_close(file: SafetensorsWriter | StagedWriter) -> None:
    try:
        file.fsync()
    finally:
        file.close()


def _commit(work: Path, target: Path, shards: Sequence[Sequence[ExportedTensor]]) -> None:
    """Move the files of a complete checkpoint into the directory; the file that readers open first is moved last."""
    # If several jobs save to the directory, the last job to move that file wins. An existing index stays: if one job
    # could replace it by one file, and another job that file by an index, the two could leave neither.
    indexed = len(shards) > 1 or (target / INDEX_FILE).exists()
    decisive = INDEX_FILE if indexed else SINGLE_FILE
    if indexed:
        weight_map = _name_shards(work, target, shards)
        total_bytes = sum(item.nbytes for items in shards for item in items)
        _write_json(work / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    else:
        (work / shard_name(1, 1)).rename(work / SINGLE_FILE)
    leave_out_present(work, target)
    others = [file for file in files_in_order(work) if file.name != decisive]
    for file in (*others, work / decisive):  # a full disk raises before the first file is moved
        fsync_path(file)
    for file in others:
        moved = target / file.relative_to(work)
        moved.parent.mkdir(exist_ok=True)
        file.replace(moved)
    for folder in {(target / file.relative_to(work)).parent for file in others} | {target}:
        fsync_path(folder)
    with freed_in_background(target / SINGLE_FILE):
        (work / decisive).replace(target / decisive)
        fsync_path(target)
        if indexed:
            (target / SINGLE_FILE).unlink(missing_ok=True)  # readers prefer it to an index
            fsync_path(target)
    _remove_old_shards(work, target)


def _remove_old_shards(work: Path, target: Path) -> None:
    """Remove the shards that the index lacks, unless another job is saving: its index may not be in place yet."""
    shards = [file for file in target.iterdir() if _SHARD_FILE.fullmatch(file.name)]
    if not shards or others_at_work(work):
        return
    try:
        used = set(json.loads((target / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        used = set()
    for file in shards:
        if file.name not in used:
            with freed_in_background(file):
                file.unlink(missing_ok=True)


def _name_shards(work: Path, target: Path, shards: Sequence[Sequence[ExportedTensor]]) -> dict[str, str]:
    """Give shards names that no file of the target has had; return the weight map."""
    # The usual names are for the first checkpoint of a directory: another job could remove files with reused names.
    usual = [shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    stem = "model" if _claims_usual_names(target, usual[0]) else f"model-{uuid.uuid4().hex[:8]}"
    weight_map = {}
    for name, items in zip(usual, shards, strict=True):
        final = name.replace("model", stem, 1)
        (work / name).rename(work / final)
        weight_map.update({item.name: final for item in items})
    return weight_map


def _claims_usual_names(target: Path, first: str) -> bool:
    """Return whether the directory has no file of a checkpoint, and no other job is creating its first file."""
    if any(file.name in (SINGLE_FILE, INDEX_FILE) or _SHARD_FILE.fullmatch(file.name) for file in target.iterdir()):
        return False
    try:
        (target / first).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_and_fsync(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
