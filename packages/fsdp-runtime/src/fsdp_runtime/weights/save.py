"""Save a sharded model as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

import os
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
from fsdp_runtime.sharded.collectives import ModelRanks, first_rank_speaks, raise_on_all, require_equal_on_all
from fsdp_runtime.sharded.fsync import naming_total
from fsdp_runtime.sharded.model_state import ModelState
from fsdp_runtime.sharded.paths import require_path
from fsdp_runtime.sharded.safetensors_io import SafetensorsLayout, SafetensorsWriter
from fsdp_runtime.sharded.work_directory import machine, remove_work, work_directory
from fsdp_runtime.weights.commit import commit
from fsdp_runtime.weights.companion_files import SourceFolder, save_companions
from fsdp_runtime.weights.files import RankFiles, parse_bytes, plan_files
from fsdp_runtime.weights.multi_token_heads import CopiedTensor, heads_at_source
from fsdp_runtime.weights.naming import Names
from fsdp_runtime.weights.quantize.formats import Quantization
from fsdp_runtime.weights.stream import ExportedModel, WeightExport, started_ahead


@dataclass(frozen=True)
class SaveReport:
    """Result of :func:`save_weights` on one rank."""

    bytes_written: int = 0  # bytes of tensors that this rank wrote


@dataclass(frozen=True)
class _RankPart:
    """The values of one rank that all ranks need."""

    machine: str
    options: Mapping[str, object]
    heads: Sequence[CopiedTensor]  # of the source checkpoint, by the first rank


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

    Collective over the model's mesh, or over the world for a model of plain tensors.  One rank writes each file.
    Files are assigned to balance bytes per rank, and every host writes at least one file.  Tensors are gathered to the
    writing rank, 64 MiB at a time or one larger tensor.  The first rank writes plain tensors.
    Files are written to a temporary directory, which all ranks have to see, and then renamed.
    One last rename makes the new weights take effect, so a process killed at any time leaves either the old or the new
    weights complete; the config is renamed just before.  If jobs save to one directory at the same time, the last
    rename takes effect.  Old files are removed after the rename, as the disk may have no room for both.
    A concurrent :func:`load_weights` then opens the new files; a reader of another library misses a file and retries.

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        directory: the same on every rank; created if it does not exist; other files in it stay, also a tokenizer or
            a processor that was saved there.
        max_shard_size: maximum bytes per file, a number or a text such as ``"5GB"`` or ``"500MiB"``; a larger tensor
            gets a separate file.  Smaller files let more ranks write at the same time.
        dtype: the tensors' dtype, as in :class:`~fsdp_runtime.sync.WeightExport`; the config gets the same dtype.
        names: the tensors' names, as in ``WeightExport``.
        quantize: low precision of linear layers, as in ``WeightExport``; the config records it.
        asynchronous: return a :class:`~fsdp_runtime.sharded.async_saves.SaveFuture` once this rank's files are gathered
            and copied to host memory; a thread writes them while training goes on and changes the weights.  ``wait()``
            returns the report and raises the thread's errors.  A later save of this process waits until the thread has
            ended.

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
        options = {
            "max_shard_size": parse_bytes(max_shard_size),
            "dtype": dtype,
            "names": names,
            "quantize": quantize,
            "asynchronous": asynchronous,
            "directory": os.path.normpath(target),
        }
        require_loaded([entry.names[0] for entry in state.entries if entry.tensor.is_meta], "save_weights")
        exporter = WeightExport(dtype=dtype, names=names, quantize=quantize)
        export = exporter.resolve(state)
        copies_heads = ranks.is_first and names == "checkpoint"
        source = SourceFolder(export.base)
        heads = heads_at_source(source, {item.name for item in export.weights}) if copies_heads else []
        step.value = _RankPart(machine(), options, heads)
        wait_for_running()
    parts: Mapping[int, _RankPart] = step.values
    require_equal_on_all({rank: part.options for rank, part in parts.items()})
    export.append(parts[ranks.global_first].heads)
    machines = {rank: part.machine for rank, part in parts.items()}
    plan = plan_files(export.groups, max_shard_size, machines)
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
        return save_in_thread(finish, ranks, list(parts), resources) if asynchronous else finish(ranks)


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
