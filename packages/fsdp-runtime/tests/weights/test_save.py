"""Saving: transformers loads the files, a kill leaves the old or the new checkpoint, and no rank is left waiting."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp_runtime import (
    OptionError,
    WeightsError,
    load_adapter,
    load_weights,
    parallelize,
    resolve_parallelism,
    save_adapter,
    save_weights,
)
from fsdp_runtime.errors import OtherRankError
from fsdp_runtime.sharded import saved_files
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter, WeightInfo
from fsdp_runtime.steps.tensor import lora
from fsdp_runtime.steps.tensor.step import TensorParallel
from fsdp_runtime.sync import WeightExport
from fsdp_runtime.training_state import load_training_state, save_training_state
from fsdp_runtime.weights import companion_files
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint
from harness.models import ARCHITECTURES, tiny_model
from harness.pairwise import pairwise_first
from harness.parity import mesh_for
from harness.ranks import RankPool

AXES = ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2})


def _model(architecture: str = "LlamaForCausalLM", *, seed: int = 0, **options: Any) -> nn.Module:
    return tiny_model(architecture, dtype=torch.float32, seed=seed, **options)


def _save(architecture: str, axes: dict[str, int], directory: Path, *, tied: bool = False, **options: Any) -> None:
    save_weights(parallelize(_model(architecture, tied=tied), mesh_for(axes)), directory, **options)


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    ("architecture", "axes", "tied"), pairwise_first(ARCHITECTURES, AXES, [True, False], limit=5), ids=str
)
def test_saved_files_equal_save_pretrained_and_load_in_transformers(
    four_ranks: RankPool, tmp_path: Path, architecture: str, axes: dict[str, int], tied: bool
) -> None:
    reference = _model(architecture, tied=tied)
    reference.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    directory = tmp_path / "ours"
    four_ranks.run(_save, architecture, axes, directory, tied=tied, max_shard_size=100_000)
    reloaded, found = getattr(transformers, architecture).from_pretrained(directory, output_loading_info=True)
    assert not any(found.values())
    _assert_equal(reloaded.state_dict(), reference.state_dict())
    shards = list(directory.glob("*.safetensors"))
    assert len(shards) > 2
    assert all(file.stat().st_size < 110_000 for file in shards)
    _assert_equal({k: v for file in shards for k, v in load_file(file).items()}, expected)
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((d / name).read_text()) for d in (directory, tmp_path / "theirs"))
        assert ours == theirs


def _files_written_by_a_replica(directory: Path) -> list[str]:
    """Split over ``tp`` only, so that no parameter knows of the replicas; the files that this rank moved into place."""
    model = _model()
    resolved = resolve_parallelism(model, mesh_for({"dp_replicate": 2, "tp": 2}))
    steps = tuple(each for each in resolved.steps if isinstance(each[0], TensorParallel))
    replace(resolved, steps=steps).apply(model)
    moved, move = [], Path.replace
    Path.replace = lambda file, target: (moved.append(target.name), move(file, target))[1]  # type: ignore[method-assign]
    try:
        save_weights(model, directory)
    finally:
        Path.replace = move  # type: ignore[method-assign]
    return moved


def test_one_rank_of_all_replicas_writes(four_ranks: RankPool, tmp_path: Path) -> None:
    first, *others = four_ranks.run(_files_written_by_a_replica, tmp_path)
    assert "model.safetensors" in first
    assert others == [[], [], []]


def test_a_model_that_fits_one_file_has_no_index(tmp_path: Path) -> None:
    save_weights(_model(), tmp_path, dtype=torch.bfloat16)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    _assert_equal(reloaded.state_dict(), _model().to(torch.bfloat16).state_dict())


def test_a_weight_that_blocks_share_without_a_declaration_is_saved_under_each_name(tmp_path: Path) -> None:
    model = _model()
    shared = "mlp.down_proj.weight"
    first, second = model.model.layers[:2]
    second.mlp.down_proj.weight = first.mlp.down_proj.weight
    names = [weight.name for weight in WeightExport().describe(model)]
    assert {f"model.layers.0.{shared}", f"model.layers.1.{shared}"} <= set(names)
    assert len(names) == len(set(names))
    save_weights(model, tmp_path)
    reloaded, found = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    _assert_equal(dict(reloaded.state_dict()), dict(model.state_dict()))
    load_weights(model, tmp_path)
    _assert_equal(dict(model.state_dict()), dict(reloaded.state_dict()))


def test_an_empty_directory_name_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for empty in ("", " "):
        with pytest.raises(OptionError, match=r"directory='.?' is empty"):
            save_weights(nn.Linear(2, 2), empty)
        with pytest.raises(OptionError, match=r"directory='.?' is empty"):
            save_training_state(empty, nn.Linear(2, 2), step=1)
    with pytest.raises(OptionError, match="directory=None: give a path"):
        save_weights(nn.Linear(2, 2), None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for path in (tmp_path / ("a" * 300), "b" * 5000):
        for call in (save_weights, lambda model, path: save_training_state(path, model, step=1), load_weights):
            with pytest.raises(OptionError, match=r"of \d+ characters, is too long for the file system"):
                call(model, path)  # type: ignore[operator]


def _calls_that_differ(directory: Path) -> list[str]:
    model = parallelize(_model(), mesh_for({"dp_shard": 2}))
    adapted: Any = peft.get_peft_model(_model(), peft.LoraConfig(target_modules=["q_proj"]))
    adapted.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"]))
    adapted = parallelize(adapted, mesh_for({"dp_shard": 2}))
    rank = dist.get_rank()
    for number in range(2):
        save_training_state(directory / "states" / str(number), model, step=1, extra={"run": number})
    adapter = ("default", "other")[rank]
    messages = []
    for refused in (
        lambda: save_weights(model, directory / str(rank)),
        lambda: save_training_state(directory / str(rank), model, step=1),
        lambda: save_adapter(adapted, directory / str(rank)),
        lambda: save_training_state(directory, model, step=rank),
        lambda: save_training_state(directory, model, step=rank - 1),
        lambda: save_training_state(directory, model, step=1, asynchronous=bool(rank)),
        lambda: save_adapter(adapted, directory, adapter=adapter),
        lambda: load_adapter(adapted, directory, adapter=adapter),
        lambda: load_training_state(directory / "states" / str(rank), model),
    ):
        with pytest.raises((OptionError, OtherRankError)) as refusal:
            refused()
        messages.append(str(refusal.value))
    return messages


def test_ranks_that_give_different_directories_steps_or_adapters_are_refused(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    save_adapter(peft.get_peft_model(_model(), peft.LoraConfig(target_modules=["q_proj"])), tmp_path)
    before = sorted(tmp_path.iterdir())
    first, second = two_ranks.run(_calls_that_differ, tmp_path, timeout=60)
    for message in first[:3]:
        assert message == (
            f"directory is {str(tmp_path / '0')!r} on rank 0 and {str(tmp_path / '1')!r} on rank 1: "
            "give the same on every rank"
        )
    for start, message in zip(
        ("step is 0", "step=-1", "asynchronous is False", *["adapter is 'default'"] * 2, "directory: the checksum of"),
        first[3:],
        strict=True,
    ):
        assert message.startswith(start)
    assert second[4].startswith("rank 0: OptionError: step=-1")
    assert [*first[:4], *first[5:]] == [*second[:4], *second[5:]]
    assert sorted(tmp_path.iterdir()) == [*before, tmp_path / "states"]


def test_a_model_without_a_config_is_saved_and_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    save_weights(model, tmp_path)
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    load_weights(other, tmp_path)
    _assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_files_hold_any_dtype_and_shape_aligned_and_in_any_order(tmp_path: Path) -> None:
    tensors = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "flag": torch.tensor(True),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "nothing": torch.empty(0, 4),
        "wide": torch.randn(2, 3, dtype=torch.float64).T,
    }
    planned = [WeightInfo(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    with SafetensorsWriter(tmp_path / "x.safetensors", planned) as file:
        for name in reversed(tensors):
            file.write(name, tensors[name])
    _assert_equal(load_file(tmp_path / "x.safetensors"), tensors)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


# An old checkpoint in the same directory.


def _tensors(directory: Path) -> dict[str, Tensor]:
    with HubCheckpoint(directory) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


SIZES = {"one file": 10**9, "several": 100_000}
OLD_AND_NEW = [
    ("one file", "several"),
    pytest.param("several", "one file", marks=pytest.mark.slow),
    *(pytest.param(size, size, marks=pytest.mark.slow) for size in SIZES),
]


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW)
def test_a_new_checkpoint_replaces_the_old_and_nothing_else(tmp_path: Path, old: str, new: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    save_weights(_model(seed=1), tmp_path, max_shard_size=SIZES[old])
    save_weights(_model(seed=2), tmp_path, max_shard_size=SIZES[new])
    fresh = tmp_path / "fresh"
    save_weights(_model(seed=2), fresh, max_shard_size=SIZES[new])
    _assert_equal(_tensors(tmp_path), _tensors(fresh))
    _assert_equal(transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict(), _model(seed=2).state_dict())
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    index = (old, new) == ("several", "one file")  # it stays, and lists the one file
    assert len([f for f in tmp_path.iterdir() if f.is_file()]) == len(list(fresh.iterdir())) + 1 + index


class _Killed(BaseException):
    """Stands for a kill: no handler of ours may catch it."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Arm a kill at the n-th change to the directory; the clean-up of the process that is killed does not run."""
    budget = [10**9]

    def counted(original: Any) -> Any:
        def change(*args: Any, **kwargs: Any) -> Any:
            if budget[0] == 0:
                raise _Killed
            budget[0] -= 1
            return original(*args, **kwargs)

        return change

    for name in ("replace", "unlink"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    remove = saved_files.shutil.rmtree
    monkeypatch.setattr(saved_files.shutil, "rmtree", lambda *args, **kwargs: budget[0] and remove(*args, **kwargs))
    monkeypatch.setattr(saved_files, "_has_ended", lambda pid, start: True)
    yield lambda count: budget.__setitem__(0, count)
    budget[0] = 10**9


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW)
def test_a_kill_at_any_change_leaves_the_old_or_the_new_checkpoint_complete(
    tmp_path: Path, kill_at: Any, old: str, new: str
) -> None:
    states = [_model(seed=seed).state_dict() for seed in (1, 2)]
    seen = []
    for count in range(100):
        directory = tmp_path / str(count)
        kill_at(10**9)
        save_weights(_model(seed=1), directory, max_shard_size=SIZES[old])
        kill_at(count)
        try:
            save_weights(_model(seed=2), directory, max_shard_size=SIZES[new])
        except _Killed:
            found = _tensors(directory)
            matching = [all(torch.equal(found[name], state[name]) for name in state) for state in states]
            assert any(matching)
            seen.append(matching.index(True))
            kill_at(10**9)
            save_weights(_model(seed=2), directory, max_shard_size=SIZES[new])
            assert not list(directory.glob(".saving-*"))
        else:
            break
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert len(seen) >= 3


# A first rank that fails.


def _failing_save(
    directory: Path, *, writes_before_failure: int, failing: int = 0, axes: dict[str, int] | None = None
) -> str:
    """Return this rank's error when one rank's disk is full after some writes."""
    model = parallelize(_model(seed=2), mesh_for(axes or {"dp_shard": 2}))
    written = []
    original = SafetensorsWriter.write

    def write(self: SafetensorsWriter, name: str, tensor: Tensor, start: int = 0) -> int:
        if dist.get_rank() == failing and len(written) == writes_before_failure:
            raise OSError("no space left on device")
        written.append(name)
        return original(self, name, tensor, start)

    SafetensorsWriter.write = write  # type: ignore[method-assign]
    try:
        save_weights(model, directory, max_shard_size=100_000)
    except (OSError, WeightsError) as error:
        dist.barrier()  # the ranks are still in step
        return f"{type(error).__name__}: {error}"
    finally:
        SafetensorsWriter.write = original  # type: ignore[method-assign]
    return "saved"


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize(("writes", "failing"), [(0, 0), (4, 1), (9, 0)])
def test_a_full_disk_ends_every_rank_and_leaves_the_old_checkpoint(
    two_ranks: RankPool, tmp_path: Path, writes: int, failing: int, axes: dict[str, int]
) -> None:
    save_weights(_model(seed=1), tmp_path, max_shard_size=100_000)
    before = sorted(file.name for file in tmp_path.iterdir())
    errors = two_ranks.run(_failing_save, tmp_path, writes_before_failure=writes, failing=failing, axes=axes)
    assert errors[failing] == "OSError: no space left on device"
    assert errors[1 - failing] == f"OtherRankError: rank {failing}: {errors[failing]}"
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    _assert_equal(_tensors(tmp_path), dict(_model(seed=1).state_dict()))
    if writes == 4:  # there is room again
        assert two_ranks.run(_failing_save, tmp_path, writes_before_failure=10**6, axes=axes) == ["saved"] * 2
        _assert_equal(_tensors(tmp_path), dict(_model(seed=2).state_dict()))


@contextmanager
def _largest_file(nbytes: int) -> Iterator[None]:
    """Let the operating system refuse to write beyond some bytes of a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_refused_write_names_file_and_bytes_and_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    small, large = nn.Linear(8, 8), nn.Linear(512, 512)
    save_weights(small, tmp_path)
    with _largest_file(200_000), pytest.raises(OSError, match=r"could not write .*model.*, a file of 10\d{5} bytes"):
        save_weights(large, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(_tensors(tmp_path)["weight"], small.weight)
    adapted: Any = peft.get_peft_model(_model(seed=1), peft.LoraConfig(r=8, target_modules=["q_proj"]))
    save_adapter(adapted, tmp_path)
    saved = (tmp_path / "adapter_model.safetensors").read_bytes()
    files = sorted(file.name for file in tmp_path.iterdir())
    with torch.no_grad():
        next(p for name, p in adapted.named_parameters() if "lora_B" in name).fill_(1)
    with _largest_file(2_000), pytest.raises(OSError, match=r"could not write .*adapter_model.*, a file of \d+ bytes"):
        save_adapter(adapted, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == files
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == saved


def test_a_disk_without_room_is_told_the_bytes_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(descriptor: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save_weights(model := _model(), tmp_path / "fits", max_shard_size=SIZES["several"])
    nbytes = sum(file.stat().st_size for file in (tmp_path / "fits").glob("*.safetensors"))
    monkeypatch.setattr(saved_files, "reserve", reserve)
    with pytest.raises(OSError, match=rf"No space left .*, a file of \d+ bytes; .*; {nbytes} bytes are needed in all"):
        save_weights(model, tmp_path / "full", max_shard_size=SIZES["several"])


def _files(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "saved",
    [
        save_weights,
        partial(save_weights, max_shard_size=SIZES["several"]),
        lambda model, directory: save_training_state(directory, model, step=1),
    ],
    ids=["one file", "several", "state"],
)
def test_a_disk_that_any_fsync_finds_full_is_named_and_keeps_nothing_of_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Callable[[nn.Module, Path], Any]
) -> None:
    room, fsync = [0], os.fsync

    def full(descriptor: int) -> None:
        room[0] -= stat.S_ISREG(os.fstat(descriptor).st_mode)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    for count in range(100):
        directory, room[0] = tmp_path / str(count), 10**9
        saved(_model(seed=1), directory)
        before, room[0] = _files(directory), count
        errors = []
        try:
            saved(_model(seed=2), directory)
        except OSError as error:
            errors.append(error)
        assert all(each.errno == errno.ENOSPC and str(directory) in str(each) for each in errors)
        assert not errors or _files(directory) == before
        assert not list(directory.glob(".*"))
        if room[0] >= 0:
            break
    assert count > 3


def test_a_config_that_finds_no_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(companion_files, "save_config", full)
    monkeypatch.setattr(lora, "save_adapter_config", full)
    adapted: Any = peft.get_peft_model(_model(), peft.LoraConfig(r=8, target_modules=["q_proj"]))
    for saved, name in ((save_weights, "config.json"), (save_adapter, "adapter_config.json")):
        with pytest.raises(OSError, match=rf"could not write {tmp_path}/.*/{name}; earlier .* Free space on its disk"):
            saved(adapted, tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_ends_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = two_ranks.run(_failing_save, tmp_path / "file", writes_before_failure=0)
    assert first.startswith(("FileExistsError", "NotADirectoryError"))
    assert second.startswith(f"OtherRankError: rank 0: {first[:10]}")


def _without_renames(directory: Path, *, asynchronous: bool) -> str:
    """Return this rank's error where the file system cannot rename a file over another one."""
    model = parallelize(_model(seed=2), mesh_for({"dp_shard": 2}))

    def refused(self: Path, target: Path) -> Path:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported", str(self), None, str(target))

    replace_, Path.replace = Path.replace, refused  # type: ignore[method-assign]
    try:
        with pytest.raises((OSError, WeightsError)) as failure:
            save_weights(model, directory, asynchronous=True).wait() if asynchronous else save_weights(model, directory)
    finally:
        Path.replace = replace_  # type: ignore[method-assign]
    dist.barrier()
    return f"{type(failure.value).__name__}: {failure.value}"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_save_weights_keeps_the_old_checkpoint_where_files_cannot_be_renamed(
    two_ranks: RankPool, tmp_path: Path, asynchronous: bool
) -> None:
    save_weights(_model(seed=1), tmp_path)
    first, second = two_ranks.run(_without_renames, tmp_path, asynchronous=asynchronous)
    assert "Operation not supported" in first
    assert second.startswith("OtherRankError: rank 0: OSError")
    _assert_equal(_tensors(tmp_path), dict(_model(seed=1).state_dict()))
    assert not list(tmp_path.glob(".*"))


def _unseen(directory: Path) -> list[str]:
    """Return this rank's errors where one rank sees another disk under the directory's name."""
    model = parallelize(_model(seed=2), mesh_for({"dp_shard": 2}))
    is_dir, found = Path.is_dir, []
    if dist.get_rank() == 1:
        Path.is_dir = lambda self, **options: False  # type: ignore[method-assign,assignment]
    try:
        for save in (save_weights, lambda model, path, **given: save_training_state(path, model, step=1, **given)):
            with pytest.raises((OptionError, WeightsError)) as failure:
                save(model, directory, asynchronous=True)
            found.append(f"{type(failure.value).__name__}: {failure.value}")
    finally:
        Path.is_dir = is_dir  # type: ignore[method-assign]
    dist.barrier()
    return found


#: Options of a save or a load on the first and the second rank.
DIFFERENT: tuple[tuple[str, Any, Any], ...] = (
    ("max_shard_size", 10_000, 0),
    ("max_shard_size", 10_000, 20_000),
    ("dtype", None, torch.bfloat16),
    ("asynchronous", False, True),
    ("training", False, True),
)


def _refusals_of_different_options(directory: Path) -> list[str]:
    model = parallelize(tiny_model("LlamaForCausalLM", dtype=torch.float32), mesh_for({"tp": 2}))
    save_weights(model, directory)
    found = []
    for name, *values in DIFFERENT:
        call: Any = load_weights if name == "training" else save_weights
        with pytest.raises((OptionError, OtherRankError)) as caught:
            call(model, directory, **{name: values[dist.get_rank()]})
        found.append(str(caught.value))
    return found


def test_options_that_differ_between_ranks_are_refused_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    for messages in two_ranks.run(_refusals_of_different_options, tmp_path, timeout=60):
        assert all(name in message for (name, *_), message in zip(DIFFERENT, messages, strict=True))
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".safetensors"] == ["model.safetensors"]


def test_a_directory_that_one_rank_does_not_see_is_refused_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    for first, second in zip(*two_ranks.run(_unseen, tmp_path), strict=True):
        assert second.startswith("OptionError: directory: rank 1 does not see")
        assert first == f"OtherRankError: rank 1: {second}"
    assert list(tmp_path.iterdir()) == []
