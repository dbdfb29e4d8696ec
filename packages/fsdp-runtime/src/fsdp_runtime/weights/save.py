"""Save a sharded model as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import nn

from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.model.inference_mode import leave_inference_mode
from fsdp_runtime.model.materialize import require_loaded
from fsdp_runtime.sharded.async_saves import HostStaging, SaveFuture, save_in_thread, wait_for_running
from fsdp_runtime.sharded.collectives import ModelRanks, first_rank_speaks, raise_on_all
from fsdp_runtime.sharded.model_state import ModelState
from fsdp_runtime.sharded.safetensors_io import SafetensorsLayout, SafetensorsWriter, WeightInfo
from fsdp_runtime.sharded.saved_files import (
    freed_in_background,
    fsync_path,
    machine,
    naming_total,
    others_at_work,
    remove_work,
    require_path,
    work_directory,
    write_and_fsync,
)
from fsdp_runtime.weights.companion_files import SourceFolder, files_in_order, leave_out_present, save_companions
from fsdp_runtime.weights.export import Names
from fsdp_runtime.weights.files import RankFiles, parse_bytes, plan_files, shard_name
from fsdp_runtime.weights.hub_checkpoint import INDEX_FILE, SINGLE_FILE
from fsdp_runtime.weights.multi_token_heads import heads_at_source
from fsdp_runtime.weights.quantize.formats import Quantization
from fsdp_runtime.weights.stream import ExportedModel, WeightExport, started_ahead

_SHARD_FILE = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class SaveReport:
    """Result of :func:`save_weights` on one rank."""

    bytes_written: int = 0  # bytes of tensors that this rank wrote


class _WeightOptions(TypedDict, total=False):
    """Keywords of :func:`save_weights` that leave its return type unchanged."""

    max_shard_size: int | str
    dtype: torch.dtype | None
    names: Names
    quantize: Quantization | None


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
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    names: Names = "checkpoint",
    quantize: Quantization | None = None,
    asynchronous: bool = False,
) -> SaveReport | SaveFuture[SaveReport]:
    """Save a model as safetensors, with its configs and the files of the checkpoint that it was loaded from.

    The files are ``config.json``, ``generation_config.json``, the files of the tokenizer and of the processor, and the
    code of a class that was loaded with ``trust_remote_code``.  The checkpoint's folder is the folder that
    :func:`load_weights` or ``from_pretrained`` read.  A tokenizer is not copied if the vocabulary was resized; a
    warning says so.  Multi-token heads, which transformers does not load, are copied from the same folder bit for bit.

    Collective over the model's mesh, or over the world for a model of plain tensors.  One rank writes each file.  Files
    are assigned to balance bytes per rank, and every host writes at least one.  Tensors are gathered to the writing
    rank, 64 MiB at a time or one larger tensor.  The first rank writes plain tensors.

    Files are written to a temporary directory, which all ranks have to see, and then renamed.  The last rename makes
    the new weights take effect, so a process killed at any time leaves either the old or the new weights complete; the
    config is renamed just before.  Of jobs that save at the same time, the last rename takes effect.  Old files are
    removed after it, as the disk may have no room for both.  A concurrent :func:`load_weights` then opens the new
    files; a reader of another library misses a file and retries.

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        directory: created if it does not exist; other files in it stay, such as a saved tokenizer or processor.
        max_shard_size: maximum bytes per file, a number or a text such as ``"5GB"`` or ``"500MiB"``; a larger tensor
            gets a separate file.  Smaller files let more ranks write at the same time.
        dtype: as in :class:`~fsdp_runtime.sync.WeightExport`; the config gets the same dtype.
        names: as in ``WeightExport``.
        quantize: as in ``WeightExport``; the config records it.
        asynchronous: return a :class:`~fsdp_runtime.sharded.async_saves.SaveFuture` once this rank's files are gathered
            and copied to host memory; a thread writes them while training goes on and changes the weights.  A later
            save of this process waits until the thread has ended.

    Raises:
        ConversionError: the model's tensors differ from the class's tensors (``names="model"`` works) or are quantized.
        OptionError: ``max_shard_size`` is no positive size, ``dtype`` not a floating-point dtype, ``quantize`` no
            ``Quantization``, ``names`` unknown, the directory empty or not seen by one rank, or an option not the same
            on every rank.
        ModelError: tensors are on the meta device.
        WeightsError: safetensors lacks the dtype of a tensor.
        OSError: on a rank that cannot write.  The directory's old contents stay in effect, except if only the fsync
            after the last rename failed.
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
    state = ModelState(model)
    ranks = state.writers
    with raise_on_all(ranks) as step, first_rank_speaks(ranks.groups):
        target = require_path("directory", directory)
        step.options = {
            "max_shard_size": parse_bytes(max_shard_size),
            "dtype": dtype,
            "names": names,
            "quantize": quantize,
            "asynchronous": asynchronous,
            "directory": os.path.normpath(target),
        }
        require_loaded([entry.names[0] for entry in state.entries if entry.tensor.is_meta], "save_weights")
        export = WeightExport(dtype=dtype, names=names, quantize=quantize).prepare(state)
        copies_heads = ranks.is_first and names == "checkpoint"
        source = SourceFolder(export.base)
        heads = heads_at_source(source, {item.name for item in export.weights}) if copies_heads else []
        step.value = machine(), heads
        wait_for_running()
    export.groups.extend(step.values[ranks.global_first][1])
    plan = plan_files(export.groups, max_shard_size, {rank: host for rank, (host, _) in step.values.items()})
    with ExitStack() as resources:
        work = resources.enter_context(work_directory(target, ranks))
        staging = HostStaging() if asynchronous else None
        with leave_inference_mode():
            on_disk = _write_files(plan, export, work, ranks, staging, resources)
        with raise_on_all(ranks):
            if ranks.is_first and is_transformers_model(export.base):
                save_companions(source, work, target, export.config_dtype, export.quantization_config)
        if staging is not None:
            staging.synchronize()
        finish = partial(_finish, on_disk, plan, work, target)
        return save_in_thread(finish, ranks, list(step.values), resources) if asynchronous else finish(ranks)


def _write_files(
    plan: Mapping[int, RankFiles],
    export: ExportedModel,
    work: Path,
    ranks: ModelRanks,
    staging: HostStaging | None,
    resources: ExitStack,
) -> list[Callable[[], None]]:
    """Gather each tensor to the rank that writes it, and write or stage the files; return calls that complete them."""
    contents = plan[ranks.rank].files if ranks.rank in plan else []
    total = sum(SafetensorsLayout(items).nbytes for share in plan.values() for _, items in share.files)
    with raise_on_all(ranks), naming_total(total):
        files = [SafetensorsWriter(work / name, items, staging=staging) for name, items in contents]
    file_of = {item.name: file for file, (_, items) in zip(files, contents, strict=True) for item in items}
    last = {items[-1].name for _, items in contents}
    for written in files:
        resources.callback(written.close)
    on_disk: list[Callable[[], None]] = []
    pool = resources.enter_context(ThreadPoolExecutor(1, "fsync"))
    rounds = (
        [export.gather(groups, to=rank) for rank, groups in zip(plan, buckets, strict=True) if groups]
        for buckets in zip_longest(*(share.buckets for share in plan.values()))
    )
    for gathers in started_ahead(rounds, 1):  # a round is gathered while the earlier round is written
        with raise_on_all(ranks):
            for item, tensor in chain.from_iterable(gathers):  # the tensors of this rank's files
                file = file_of[item.name]
                file.add(item.name, tensor)
                if item.name in last:
                    on_disk.append(file.finish if staging is not None else pool.submit(file.finish).result)
                del tensor
    return on_disk


def _finish(
    on_disk: Sequence[Callable[[], None]], plan: Mapping[int, RankFiles], work: Path, target: Path, ranks: ModelRanks
) -> SaveReport:
    """Wait until every rank's files are on the disk, and put them into effect.  Collective."""
    with raise_on_all(ranks):
        for wait in on_disk:
            wait()
    with raise_on_all(ranks):
        if ranks.is_first:
            contents = sorted(file for share in plan.values() for file in share.files)
            commit(work, target, [items for _, items in contents])
            remove_work(work)
    return SaveReport(sum(item.nbytes for _, items in plan.get(ranks.rank, RankFiles()).files for item in items))


def commit(work: Path, target: Path, shards: Sequence[Sequence[WeightInfo]]) -> None:
    """Move the files of a complete checkpoint into the directory; the file that readers open first is moved last."""
    # If several jobs save to the directory, the last job to move that file wins. An existing index stays: if one job
    # replaced the index by a single file while another job did the reverse, both files could be removed.
    indexed = len(shards) > 1 or (target / INDEX_FILE).exists()
    decisive = INDEX_FILE if indexed else SINGLE_FILE
    if indexed:
        metadata = {"total_size": sum(item.nbytes for items in shards for item in items)}
        index = {"metadata": metadata, "weight_map": _name_shards(work, target, shards)}
        write_and_fsync(work / INDEX_FILE, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
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
            (target / SINGLE_FILE).unlink(missing_ok=True)  # readers prefer the single file to an index
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


def _name_shards(work: Path, target: Path, shards: Sequence[Sequence[WeightInfo]]) -> dict[str, str]:
    """Rename the shards to names never used before in the target; return the weight map."""
    # Only the first checkpoint of a directory gets the usual names: another job could remove files with reused names.
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
