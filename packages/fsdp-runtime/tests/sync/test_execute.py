"""Transfers from shards to shards over process groups: exact, bounded in memory, ended in time."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import tp_plans
from fsdp_runtime import parallelize
from fsdp_runtime.sync import ModelShards, WeightExport, WeightSyncError, execute_transfer
from fsdp_runtime.sync.execute import box_views
from harness.memory import LiveBytes
from harness.models import ARCHITECTURES, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool, RanksFailed
from tp_plans.transfer import EngineSize, TransferLayout

QWEN = "Qwen3ForCausalLM"


def _sharded(architecture: str, axes: dict[str, int], seed: int, **options: Any) -> nn.Module:
    model = tiny_model(architecture, dtype=torch.float32, seed=seed, **options)
    return parallelize(model, mesh_for(axes)) if axes else model


def _mesh_to_mesh(architecture: str, one: dict[str, int], other: dict[str, int], tied: bool) -> list[str]:
    """Parameters of a model on another mesh that are not the trainer's after a transfer in float32 and in bfloat16."""
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        trained, fresh = _sharded(architecture, one, 0, tied=tied), _sharded(architecture, other, 1, tied=tied)
        source, target = (
            ModelShards(trained, export=WeightExport(dtype=dtype)),
            ModelShards(fresh, export=WeightExport(dtype=dtype)),
        )
        plan = tp_plans.transfer.plan_transfer(source.layout, target.layout)
        execute_transfer(
            plan, source=source.local, destination=target.local, bucket_bytes=10_000, timeout=timedelta(seconds=60)
        )
        expected = tiny_model(architecture, dtype=torch.float32, tied=tied).state_dict()
        for name, tensor in fresh.state_dict().items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if not torch.equal(full, expected[name].to(dtype).to(torch.float32)):
                wrong.append(name)
    return wrong


FOUR = ({"dp_shard": 2, "tp": 2}, {"tp": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 4})


#: The slow ones differ in names alone.
SLOW = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForConditionalGeneration")


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ARCHITECTURES]
)
def test_a_model_reaches_another_mesh_bit_for_bit(four_ranks: RankPool, architecture: str) -> None:
    place = ARCHITECTURES.index(architecture)
    one, other = FOUR[place % 4], FOUR[(place + 1) % 4]
    assert four_ranks.run(_mesh_to_mesh, architecture, one, other, place % 2 == 0) == [[]] * 4


def _engine(model_type: str, tp: int, ep: int) -> tuple[nn.Module, Any]:
    """A tiny model of a family with experts or without, and the size of its engine."""
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if model_type == "qwen3":
        config: Any = transformers.Qwen3Config(**common, **heads, tie_word_embeddings=True)
    elif model_type == "qwen3_moe":
        moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = transformers.Qwen3MoeConfig(**common, **heads, **moe)
    else:
        latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
        moe = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "v_head_dim": 16}
        common.pop("head_dim")
        more = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_attention_heads": 4}
        config = transformers.DeepseekV3Config(**common, **latent, **moe, **more, num_key_value_heads=4)
        heads["num_key_value_heads"] = 4
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model, EngineSize(**heads, tp=tp, ep=ep)


def _wanted(layout: TransferLayout, rank: int, full: dict[str, Tensor], local: dict[str, Tensor]) -> bool:
    """Whether every block of a rank holds its slice of the full tensors."""
    for name, tensor in full.items():
        for part, view in box_views(layout, rank, local, name, tuple((0, size) for size in tensor.shape)):
            if not torch.equal(view, tensor[tuple(slice(*side) for side in part)].to(view.dtype)):
                return False
    return True


def _to_engine(model_type: str, tp: int, ep: int) -> tuple[bool, int, int, int]:
    """Ranks 0 and 1 train, all four or the last two are the engine's: right, peak, bucket, largest full tensor."""
    from fsdp_runtime import stream_weights

    rank, bucket = dist.get_rank(), 4096
    model, size = _engine(model_type, tp, ep)
    full = {name: tensor.clone() for name, tensor in stream_weights(model, dtype=torch.bfloat16)}
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp_shard", "tp"))
    if rank < 2:
        shards = ModelShards(parallelize(model, mesh), export=WeightExport(dtype=torch.bfloat16))
    told: list[Any] = [shards.layout.to_json() if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    source = TransferLayout.from_json(told[0])
    target = tp_plans.transfer.engine_layout(source.tensors, size).shifted(0 if tp == 4 else 2)
    local = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in target.local_shapes(rank).items()}
    plan = tp_plans.transfer.plan_transfer(source, target)
    with LiveBytes() as live:
        execute_transfer(plan, source=shards.local if rank < 2 else None, destination=local, bucket_bytes=bucket)
    return _wanted(target, rank, full, local), live.peak, bucket, max(t.nbytes for t in full.values())


@pytest.mark.parametrize(
    ("model_type", "tp", "ep"),
    [
        ("qwen3", 2, 1),
        pytest.param("qwen3", 4, 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, 2, marks=pytest.mark.slow),
        ("qwen3_moe", 4, 2),
        ("deepseek_v3", 2, 1),
    ],
)
def test_an_engine_of_another_size_gets_its_slices_with_one_bucket_of_extra_memory(
    four_ranks: RankPool, model_type: str, tp: int, ep: int
) -> None:
    for right, peak, bucket, largest in four_ranks.run(_to_engine, model_type, tp, ep):
        assert right
        assert peak <= bucket < largest


def _plain_pair(rows: int = 64) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    tensors = {"w": tp_plans.transfer.CheckpointTensor((rows, 8), "float32")}
    source = tp_plans.transfer.mesh_layout(tensors, (1,), {"w": [tp_plans.Replicate()]})
    plan = tp_plans.transfer.plan_transfer(source, source.shifted(1))
    return plan, {"w": torch.ones(rows, 8)}, {"w": torch.zeros(rows, 8)}


def _missing_partner(how: str) -> str:
    """What a rank is told when its partner never comes, and in how many seconds; then a transfer that succeeds."""
    rank = dist.get_rank()
    plan, ours, theirs = _plain_pair(rows=200_000)
    group = dist.new_group([0, 1])
    told, begun = "", time.monotonic()
    absent = 1 if how == "receiver" else 0
    if rank != absent:
        try:
            execute_transfer(plan, source=ours, destination=theirs, group=group, timeout=timedelta(seconds=2))
        except WeightSyncError as error:
            told = str(error)
        assert time.monotonic() - begun < 20
    dist.barrier()
    fresh = dist.new_group([0, 1])
    execute_transfer(plan, source=ours, destination=theirs, group=fresh, timeout=timedelta(seconds=30))
    assert rank == 0 or theirs["w"].eq(1).all()
    return told


@pytest.mark.parametrize("how", ["receiver", pytest.param("sender", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_is_named_in_time_and_a_new_group_works(two_ranks: RankPool, how: str) -> None:
    told = two_ranks.run(_missing_partner, how)
    present, absent = (0, 1) if how == "receiver" else (1, 0)
    assert told[absent] == ""
    assert f"rank {present} could not complete a transfer of weights with rank {absent} within 2 s" in told[present]


def _dying_partner() -> str:
    plan, ours, theirs = _plain_pair(rows=200_000)
    if dist.get_rank() == 1:
        os._exit(3)
    execute_transfer(plan, source=ours, destination=theirs, timeout=timedelta(seconds=5))
    return ""


def test_a_rank_that_dies_ends_the_transfer_of_the_others_in_time() -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(RanksFailed) as caught:
            pool.run(_dying_partner, timeout=60)
    finally:
        pool.close(force=True)
    assert caught.value.errors[0].type_name == "WeightSyncError"
    assert caught.value.errors[1].type_name == "Died"


def test_missing_and_small_local_tensors_are_named_before_anything_is_sent() -> None:
    shards = ModelShards(nn.Linear(2, 3))
    plan = tp_plans.transfer.plan_transfer(shards.layout, shards.layout)
    with pytest.raises(WeightSyncError, match="the local tensor weight is missing on rank 0"):
        execute_transfer(plan, source=shards.local, destination={})
    small = {"weight": torch.zeros(2, 2), "bias": torch.full((3,), 7.0)}
    with pytest.raises(WeightSyncError, match=r"weight has shape \(2, 2\) on rank 0"):
        execute_transfer(plan, source=shards.local, destination=small)
    assert small["bias"].eq(7).all()
