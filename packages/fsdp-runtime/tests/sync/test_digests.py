"""Digests: the same for every sharding, other for every change, and compared block by block after a transfer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tp_plans
from fsdp_runtime import parallelize, stream_weights
from fsdp_runtime.sharded.hashing import hash_bits, hash_box
from fsdp_runtime.sync import (
    ModelShards,
    WeightExport,
    WeightSyncError,
    digest,
    digest_layout,
    execute_transfer,
    verify_transfer,
)
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from tp_plans.boxes import full_box, split_box
from tp_plans.transfer import CheckpointTensor, EngineSize

DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 20), st.sampled_from(DTYPES))
def test_addends_of_the_parts_sum_to_the_hash_of_the_full_tensor(shape: list[int], limit: int, dtype: Any) -> None:
    full = torch.randn(shape).mul(5).to(dtype)
    parts = split_box(full_box(shape), limit)
    total = sum((hash_box(full[tuple(slice(*side) for side in part)], shape, part) for part in parts), torch.tensor(0))
    assert total == hash_bits(full)


@settings(max_examples=20)
@given(st.integers(0, 23), st.integers(0, 23), st.integers(0, 15))
def test_a_flipped_bit_and_two_swapped_elements_change_the_hash(one: int, other: int, bit: int) -> None:
    full = torch.arange(24, dtype=torch.int16).view(4, 6)
    flipped, swapped = full.clone().view(-1), full.clone().view(-1)
    flipped[one] ^= torch.tensor(1 << bit).to(torch.int16)
    swapped[[one, other]] = swapped[[other, one]]
    assert hash_bits(flipped) != hash_bits(full)
    assert bool(hash_bits(swapped) == hash_bits(full)) is (one == other)


AXES = ({}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 4})


def _with_a_tower() -> nn.Module:
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return tiny_model("Gemma3ForConditionalGeneration", dtype=torch.float32, tied=True, **one_layer)


def _digests() -> list[dict[str, int]]:
    found = []
    for axes in AXES:
        model = _with_a_tower()
        found.append(
            digest(parallelize(model, mesh_for(axes)) if axes else model, export=WeightExport(dtype=torch.bfloat16))
        )
    return found


def test_a_digest_does_not_depend_on_the_mesh(four_ranks: RankPool) -> None:
    stream = stream_weights(_with_a_tower(), dtype=torch.bfloat16)
    expected = {name: int(hash_bits(tensor)) for name, tensor in stream}
    for digests in four_ranks.run(_digests):
        assert digests == [expected] * len(AXES)


def _engine_after(change: str) -> tuple[str, bool]:
    """What verification says after a transfer to an engine of two ranks and two replicas, and one change."""
    rank = dist.get_rank()
    model = tiny_model("Qwen3ForCausalLM", dtype=torch.float32)
    shards = ModelShards(
        parallelize(model, mesh_for({"dp_shard": 2, "tp": 2})), export=WeightExport(dtype=torch.bfloat16)
    )
    size = EngineSize(num_attention_heads=4, num_key_value_heads=4, tp=2)
    engine = tp_plans.transfer.engine_layout(shards.layout.tensors, size, replicas=2)
    local = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in engine.local_shapes(rank).items()}
    plan = tp_plans.transfer.plan_transfer(shards.layout, engine)
    execute_transfer(plan, source=shards.local, destination=local, bucket_bytes=50_000)
    same = digest_layout(engine, local) == digest(model, export=WeightExport(dtype=torch.bfloat16))
    if change == "engine" and rank == 3:
        _flip(local["model.layers.1.self_attn.qkv_proj.weight"][-1, -1:])
        _flip(local["model.norm.weight"][5:6])
    if change == "trainer":
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(2)
    try:
        verify_transfer(plan, source=shards.local, destination=local)
    except WeightSyncError as error:
        return str(error), same
    return "", same


def _flip(element: Tensor) -> None:
    element.copy_((element.view(torch.int16) ^ 1).view(torch.bfloat16))


def test_what_arrived_is_verified_in_every_replica_and_differing_tensors_are_named(four_ranks: RankPool) -> None:
    assert four_ranks.run(_engine_after, "nothing") == [("", True)] * 4
    for message, same in four_ranks.run(_engine_after, "engine"):
        assert same
        assert "2 tensors differ" in message
        assert "model.layers.1.self_attn.v_proj.weight: on ranks 3\n" in message
        assert "model.norm.weight: on ranks 3\n" in message
    for message, _ in four_ranks.run(_engine_after, "trainer"):
        assert "1 tensors differ" in message
        assert "model.layers.0.mlp.down_proj.weight: on ranks 0, 1, 2, 3\n" in message


def test_two_copies_on_one_rank_are_verified_both() -> None:
    tensors = {"w": CheckpointTensor((6, 2), "float32")}
    source = tp_plans.transfer.mesh_layout(tensors, (1,), {"w": [tp_plans.Replicate()]})
    box = ((0, 4), (0, 2)), ((2, 6), (0, 2))
    copies = [
        tp_plans.transfer.StoredBlock(0, box[0], "a", (0, 0), (0, 1)),
        tp_plans.transfer.StoredBlock(0, box[1], "b", (0, 0), (0, 1)),
    ]
    plan = tp_plans.transfer.plan_transfer(source, tp_plans.transfer.TransferLayout(tensors, {"w": copies}))
    ours, theirs = {"w": torch.randn(6, 2)}, {"a": torch.zeros(4, 2), "b": torch.zeros(4, 2)}
    execute_transfer(plan, source=ours, destination=theirs)
    verify_transfer(plan, source=ours, destination=theirs)
    theirs["b"][0, 0] += 1  # the other copy still has the value
    with pytest.raises(WeightSyncError, match="w: on ranks 0"):
        verify_transfer(plan, source=ours, destination=theirs)
