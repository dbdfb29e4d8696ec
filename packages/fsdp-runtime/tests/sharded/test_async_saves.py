"""Saves that a thread completes: what they save is what there was, whatever training, other ranks and exits do then."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from fsdp_runtime import parallelize, save_weights
from fsdp_runtime.errors import WeightsError
from fsdp_runtime.sharded import async_saves
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter
from fsdp_runtime.sync import Quantization
from fsdp_runtime.training_state import load_training_state, save_training_state
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.processes import preloaded_context
from harness.ranks import RankPool, RanksFailed


def _model(axes: dict[str, int], architecture: str = "LlamaForCausalLM") -> nn.Module:
    model = tiny_model(architecture, dtype=torch.float32)
    return parallelize(model, mesh_for(axes)) if axes else model


@contextmanager
def _writes_wait(seconds: float = 60.0) -> Iterator[threading.Event]:
    """No file gets to the disk before the event is set, which leaving does."""
    event, fsync = threading.Event(), SafetensorsWriter.fsync

    def waiting(file: SafetensorsWriter) -> None:
        event.wait(seconds)
        fsync(file)

    SafetensorsWriter.fsync = waiting  # type: ignore[method-assign]
    try:
        yield event
    finally:
        event.set()
        SafetensorsWriter.fsync = fsync  # type: ignore[method-assign]


def test_host_staging_waits_for_copies_that_fill_a_piece_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append("accelerator"))
    staging = async_saves.HostStaging()
    staging._room["cuda"] = torch.empty(8, dtype=torch.uint8)
    assert len(staging._take(8, "cuda")) == 8
    staging.synchronize()
    assert waits == ["accelerator"]


@torch.no_grad()
def _train(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(1)


def _files(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


# What is saved.


def _save_and_train(directory: Path, axes: dict[str, int], options: dict[str, Any]) -> None:
    async_saves._SLAB = 2**12  # most tensors are in several pieces
    model = _model(axes, options.pop("architecture", "LlamaForCausalLM"))
    expected = save_weights(model, directory / "sync", max_shard_size=100_000, **options)
    with _writes_wait() as event:
        future = save_weights(model, directory / "async", max_shard_size=100_000, asynchronous=True, **options)
        _train(model)
        assert not future.done()
        event.set()
        report = future.wait()
    assert future.done()
    assert report == expected


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp_shard": 2, "tp": 2}, {}),
        ({"tp": 4}, {"dtype": torch.bfloat16}),
        ({"dp_replicate": 2, "dp_shard": 2}, {"quantize": Quantization(format="fp8")}),
        ({"dp_shard": 2, "tp": 2, "ep": 2}, {"architecture": "Qwen3MoeForCausalLM"}),
    ],
    ids=str,
)
def test_weights_have_the_bytes_of_a_synchronous_save_though_training_goes_on(
    four_ranks: RankPool, tmp_path: Path, axes: dict[str, int], options: dict[str, Any]
) -> None:
    four_ranks.run(_save_and_train, tmp_path, axes, options)
    assert _files(tmp_path / "async") == _files(tmp_path / "sync")


class Run:
    """A model in training, whose steps draw noise."""

    def __init__(self, axes: dict[str, int], seed: int = 0) -> None:
        self.model = _model(axes)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(seed)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            logits = self.model(**tiny_inputs(self.model, batch=2, length=7), use_cache=False).logits
            logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
            loss = (logits + 0.1 * torch.randn_like(logits)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def _resumed(directory: Path, axes: dict[str, int]) -> None:
    async_saves._SLAB = 2**12
    run = Run(axes)
    run.steps(2)
    expected_state = save_training_state(directory / "sync", run.model, run.optimizer, step=2)
    with _writes_wait() as event:
        future = save_training_state(directory / "async", run.model, run.optimizer, step=2, asynchronous=True)
        expected = run.steps(2)
        event.set()
        folder = future.wait()
    assert folder.name == expected_state.name
    other = Run(axes, seed=5)
    assert load_training_state(directory / "async", other.model, other.optimizer).step == 2
    assert other.steps(2) == expected


def test_training_goes_on_and_resumes_bit_for_bit(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(_resumed, tmp_path, {"dp_shard": 2})
    assert _files(tmp_path / "async") == _files(tmp_path / "sync")


def test_one_process_without_distributed_saves_in_a_thread(tmp_path: Path) -> None:
    model = _model({})
    save_weights(model, tmp_path / "sync")
    future = save_weights(model, tmp_path / "async", asynchronous=True)
    _train(model)
    assert future.wait().bytes_written > 0
    assert _files(tmp_path / "async") == _files(tmp_path / "sync")


# A save while another one is being written.


def _second_save(directory: Path) -> None:
    model = _model({"dp_shard": 2})
    with _writes_wait() as event:
        if dist.get_rank() == 1:
            event.set()  # this rank has written, and is not done, for the other one has not
        first = save_weights(model, directory, asynchronous=True)
        _train(model)
        threading.Timer(0.5, event.set).start()
        second = save_weights(model, directory, asynchronous=True)
        assert first.done()
    first.wait()
    second.wait()
    save_weights(model, directory / "expected")


def test_a_second_save_waits_for_the_first(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(_second_save, tmp_path)
    saved = (tmp_path / "model.safetensors").read_bytes()
    assert saved == (tmp_path / "expected" / "model.safetensors").read_bytes()


# Faults.


def _failing_write(directory: Path, kind: str) -> str:
    """A disk that is full, on rank 1, while training goes on."""
    model = _model({"dp_shard": 2})
    save = {
        "weights": lambda **options: save_weights(model, directory, max_shard_size=100_000, **options),
        "state": lambda **options: save_training_state(directory, model, step=1, **options),
    }[kind]
    save()
    before = _files(directory)
    write = SafetensorsWriter.write

    def full(file: SafetensorsWriter, name: str, tensor: torch.Tensor, start: int = 0) -> int:
        if dist.get_rank() == 1:
            raise OSError("no space left on device")
        return write(file, name, tensor, start)

    SafetensorsWriter.write = full  # type: ignore[method-assign]
    try:
        future = save(asynchronous=True)
        _train(model)
        with pytest.raises((OSError, WeightsError)) as failure:
            future.wait()
    finally:
        SafetensorsWriter.write = write  # type: ignore[method-assign]
    dist.barrier()
    assert _files(directory) == before
    dist.barrier()
    save(asynchronous=True).wait()
    return f"{type(failure.value).__name__}: {failure.value}"


@pytest.mark.parametrize("kind", ["weights", "state"])
def test_an_error_of_one_rank_is_raised_by_wait_on_all_and_the_old_files_stay(
    two_ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    other, own = two_ranks.run(_failing_write, tmp_path, kind)
    assert own == "OSError: no space left on device"
    assert other == "OtherRankError: rank 1: OSError: no space left on device"


def _dies(directory: Path) -> None:
    model = _model({"dp_shard": 2})
    save_weights(model, directory)
    _train(model)
    with _writes_wait() as event:
        future = save_weights(model, directory, asynchronous=True)
        if dist.get_rank() == 1:
            os._exit(9)
        event.set()
        future.wait()


def test_the_death_of_a_rank_ends_the_save_of_the_others_with_a_typed_error(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed) as failure:
        two_ranks.run(_dies, tmp_path)
    assert failure.value.errors[0].type_name == "OtherRankError"
    with HubCheckpoint(tmp_path) as checkpoint:
        expected = dict(_model({}).named_parameters())
        assert all(torch.equal(checkpoint.read(name), expected[name]) for name in checkpoint.tensors)


def _leaves(rank: int, store: Path, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = _model({"dp_shard": 2})
    save_training_state(directory, model, step=1, asynchronous=True)
    dist.destroy_process_group()


def test_the_end_of_the_program_waits_for_the_save(tmp_path: Path) -> None:
    context = preloaded_context()
    ranks = [context.Process(target=_leaves, args=(rank, tmp_path / "store", tmp_path / "states")) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    model = _model({})
    assert load_training_state(tmp_path / "states", model).step == 1


def _saved_by_ranks_of_other_groups(directory: Path) -> None:
    """Save where one rank belongs to a group more than the other; afterwards both belong to as many."""
    rank = dist.get_rank()
    model = _model({"dp_shard": 2})
    async_saves._groups.clear()
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    save_weights(model, directory, asynchronous=True).wait()


def test_ranks_in_different_numbers_of_groups_save(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(_saved_by_ranks_of_other_groups, tmp_path, timeout=60)
    assert (tmp_path / "model.safetensors").exists()
