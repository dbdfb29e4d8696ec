"""Put the files of a complete checkpoint into effect, beside other jobs that save to the directory."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from fsdp_runtime.sharded.fsync import freed_in_background, fsync_path, write_and_fsync
from fsdp_runtime.sharded.safetensors_io import WeightInfo
from fsdp_runtime.sharded.work_directory import others_at_work
from fsdp_runtime.weights.companion_files import files_in_order, leave_out_present
from fsdp_runtime.weights.files import shard_name
from fsdp_runtime.weights.hub_checkpoint import INDEX_FILE, SINGLE_FILE

_SHARD_FILE = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")


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
