"""Bytes that saves and loads of weights are said to move, beside those that two ranks move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from fsdp_runtime import MeshSpec, OptionError, load_weights, meta_device, parallelize, save_weights
from fsdp_runtime.dry_run import WeightTraffic, describe_weights, estimate_weights
from fsdp_runtime.dry_run.trace.fake_world import fake_world
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.sharded.file_systems import FilePlace
from fsdp_runtime.sharded.rank_boxes import rank_boxes, stored_part
from fsdp_runtime.weights.file_plan import FilePlanner, Piece, WriteStep
from fsdp_runtime.weights.stream import WeightExport
from fsdp_runtime.weights.write_plan import plan_files
from harness.ranks import RankPool
from tp_plans.transfer import volume

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)


def _counted(axes: dict[str, int], directory: Path) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], bool]:
    """What this rank was said to move in a save and in a load, what it moved, and whether it held no more."""
    torch.manual_seed(0)
    mesh = MeshSpec(**axes).build(device_type="cpu")
    model = parallelize(LlamaForCausalLM(CONFIG), mesh)
    rank, found = dist.get_rank(), describe_weights(model, max_shard_bytes=100_000, bucket_bytes=20_000)
    said = [each.ranks[rank] for each in found[:2]]
    save = save_weights(model, directory, max_shard_bytes=100_000, bucket_bytes=20_000)
    load = load_weights(model, directory, bucket_bytes=20_000)
    return (
        [(each.read, each.written, each.sent, each.received) for each in said],
        [
            (0, save.bytes_written, save.bytes_sent, save.bytes_received),
            (load.bytes_read, 0, load.bytes_sent, load.bytes_received),
        ],
        save.peak_bytes <= said[0].held,
    )


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}, {"dp_replicate": 2}], ids=str)
def test_two_ranks_move_what_was_said_before(two_ranks: RankPool, axes: dict[str, int], tmp_path: Path) -> None:
    for said, moved, held in two_ranks.run(_counted, axes, tmp_path):
        assert said == moved
        assert held


# Meshes that are not there: counts of kinds of tensors, beside those of each tensor on each rank.

MIXTURE = Qwen3MoeConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_experts=4,
    num_experts_per_tok=2,
)
SHARD_BYTES, BUCKET_BYTES = 100_000, 20_000
ROUND = 16  #: bytes to a multiple of which a part of a message is rounded up


def _steps_of_each_tensor(
    model: nn.Module, ranks: list[int], writers: str, ranks_per_host: int
) -> list[tuple[int, str, tuple[WriteStep, ...]]]:
    """Size of an element, file and steps of each tensor, planned anew for each from the boxes of every rank."""
    export = WeightExport(bucket_bytes=BUCKET_BYTES).prepare(model)
    places = {rank: FilePlace(str(rank // ranks_per_host), "") for rank in ranks}
    files = {
        item.name: file
        for file in plan_files(export, SHARD_BYTES, places, shared=writers == "all")
        for item in file.items
    }
    planner, found = FilePlanner(ranks, BUCKET_BYTES // 4), []
    for group in export.groups:
        for item in group.tensors:
            pieces = []
            for number, chunk in enumerate(item.chunks or ()):
                owners: dict[Any, list[int]] = {}
                for rank, box in rank_boxes(group.sources[chunk.source], ranks[:1]):
                    owners.setdefault(box, []).append(rank)
                pieces += [
                    Piece(number, block, tuple(having))
                    for box, having in owners.items()
                    for block in stored_part(chunk, having[0], box)
                ]
            file = files[item.name]
            steps = planner.plan(item, item.name, pieces, writer=file.writer)
            found.append((item.dtype.itemsize, file.name, tuple(steps)))
    return found


def _saved_by(rank: int, tensors: list[tuple[int, str, tuple[WriteStep, ...]]]) -> tuple[int, int, int, int]:
    """Bytes that a rank writes, sends, receives, and holds at most, as it goes through the steps one by one."""
    written = sent = received = held = messages = largest = exchanged = 0
    for number, (itemsize, file, steps) in enumerate(tensors):
        for step in steps:
            if step.held and exchanged + step.held > BUCKET_BYTES:
                held, messages, largest, exchanged = max(held, messages + largest), 0, 0, 0
            exchanged += step.held
            for area in step.areas:
                if area.file_rank == rank:
                    nbytes = volume(area.box) * itemsize
                    written += nbytes
                    largest = max(largest, nbytes if step.held else min(nbytes, BUCKET_BYTES))
                for part in area.parts:
                    if (part.rank == rank) != (area.file_rank == rank):
                        nbytes = -(-volume(part.box) * itemsize // ROUND) * ROUND
                        sent, received = sent + nbytes * (part.rank == rank), received + nbytes * (part.rank != rank)
                        messages += nbytes
        if number + 1 == len(tensors) or tensors[number + 1][1] != file:
            held, messages, largest, exchanged = max(held, messages + largest), 0, 0, 0
    return written, sent, received, held


@pytest.mark.parametrize("writers", ["all", "one"])
@pytest.mark.parametrize("ranks_per_host", [2, 16])
@pytest.mark.parametrize(
    "axes",
    [
        {"dp_shard": 8},
        {"tp": 4},
        {"dp_shard": 4, "tp": 2},
        {"dp_shard": 3, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 4},
        {"dp_replicate": 4, "dp_shard": 2, "tp": 2},
        {"dp_shard": 4, "ep": 4},
        {"dp_shard": 4, "tp": 2, "ep": 2},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    ],
    ids=str,
)
def test_counts_are_those_of_each_tensor_on_each_rank(axes: dict[str, int], ranks_per_host: int, writers: Any) -> None:
    with meta_device():
        model = Qwen3MoeForCausalLM(MIXTURE) if "ep" in axes else LlamaForCausalLM(CONFIG)
    with fake_world(MeshSpec(**axes), rank=0) as mesh:
        parallelize(model, mesh)
        ranks = list(range(dist.get_world_size()))
        sizes: dict[str, Any] = {"max_shard_bytes": SHARD_BYTES, "bucket_bytes": BUCKET_BYTES}
        save, load, _ = describe_weights(model, ranks_per_host=ranks_per_host, writers=writers, **sizes)
        tensors = _steps_of_each_tensor(model, ranks, writers, ranks_per_host)
        near, needed = ranks[:ranks_per_host], 0
        for entry in state_entries(model):
            has = torch.zeros(entry.tensor.shape, dtype=torch.bool)
            for box in (box for rank, box in rank_boxes(entry.tensor, near) if rank in near):
                has[tuple(slice(*side) for side in box)] = True
            needed += int(has.sum()) * entry.tensor.dtype.itemsize
    found = {rank: (each.written, each.sent, each.received, each.held) for rank, each in save.ranks.items()}
    assert found == {rank: _saved_by(rank, tensors) for rank in ranks}
    read = sum(each.read for each in load.ranks.values())
    assert read == needed or (read > needed and axes.get("tp", 1) > ranks_per_host)  # rows with columns of other hosts
    assert sum(each.sent for each in load.ranks.values()) == sum(each.received for each in load.ranks.values())


def test_rows_need_no_network_and_a_mesh_that_is_not_there_has_the_same_bytes() -> None:
    save, load, stream = estimate_weights(CONFIG, {"dp_shard": 16}, dtype="fp32")
    total = sum(each.written for each in save.ranks.values())
    assert total == sum(p.numel() * 4 for p in LlamaForCausalLM(CONFIG).parameters())
    assert (save.most("sent"), save.most("gathered"), stream.most("gathered") > 0) == (0, 0, True)
    assert len(load.ranks) == 8


def test_seconds_are_those_of_the_busiest_host_and_rank() -> None:
    (save, *_) = describe_weights(nn.Linear(2, 3))
    assert save.seconds(disk=36.0, network=1.0) == pytest.approx(1.0)
    assert isinstance(save, WeightTraffic)
    assert str(save) == "save, bytes of the rank with the most of each: written 36 bytes"


def test_a_host_without_ranks_is_refused() -> None:
    with pytest.raises(OptionError, match="ranks_per_host=0: give a positive number"):
        describe_weights(nn.Linear(2, 3), ranks_per_host=0)
