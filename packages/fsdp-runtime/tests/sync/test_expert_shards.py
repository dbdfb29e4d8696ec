"""Sources with expert parallelism: experts over ``ep`` and FSDP2, stacked in the model, reach engines bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import tp_plans
from fsdp_runtime import parallelize, stream_weights
from fsdp_runtime.sharded.boxes import local_part, slices_of
from fsdp_runtime.sharded.hashing import hash_bits
from fsdp_runtime.sync import ModelShards, WeightExport, WeightSync, digest, digest_layout, verify_transfer
from harness.models import jitter, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from tp_plans.transfer import EngineSize


def _deepseek() -> nn.Module:
    """DeepSeek V2 with latent attention but without compressed queries."""
    torch.manual_seed(0)
    latent = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    moe = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 131}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.DeepseekV2Config(**latent, **moe, **sizes, **heads, n_group=1, topk_group=1)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    jitter(model)
    return model


def _model(name: str) -> nn.Module:
    return _deepseek() if name == "deepseek_v2" else tiny_model(name, dtype=torch.float32)


CASES: list[tuple[str, dict[str, int], dict[str, int]]] = [
    ("Qwen3MoeForCausalLM", {"dp_shard": 2, "tp": 2, "ep": 2}, {"tp": 2}),
    ("Qwen3MoeForCausalLM", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"tp": 4, "ep": 4}),
    ("GptOssForCausalLM", {"dp_shard": 4, "ep": 2}, {"tp": 2, "ep": 2}),
    ("GptOssForCausalLM", {"dp_shard": 2, "tp": 2, "ep": 4}, {"tp": 4}),
    ("deepseek_v2", {"dp_shard": 2, "tp": 2, "ep": 2}, {"tp": 2}),
]


def _synced(cases: list[int]) -> list[str]:
    """What engines hold otherwise than one process streams, after a full update and after a difference."""
    wrong, rank = [], dist.get_rank()
    for name, axes, engine in (CASES[number] for number in cases):
        plain, model = _model(name), parallelize(_model(name), mesh_for(axes))
        shards = ModelShards(model, export=WeightExport(dtype=torch.bfloat16))
        size = EngineSize(num_attention_heads=4, num_key_value_heads=4, **engine)
        target = tp_plans.transfer.engine_layout(shards.layout.tensors, size, replicas=4 // size.tp)
        local = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in target.local_shapes(rank).items()}
        plan = tp_plans.transfer.plan_transfer(shards.layout, target)
        sync = WeightSync(plan, source=shards, destination=local)
        case = f"{name} {axes} {engine}"
        for version in range(2):
            full_ranks = sync.update(version).full_ranks
            verify_transfer(plan, source=shards, destination=local)
            expected = {key: int(hash_bits(value)) for key, value in stream_weights(plain, dtype=torch.bfloat16)}
            wrong += (
                [f"{case}: trainer"] if digest(model, export=WeightExport(dtype=torch.bfloat16)) != expected else []
            )
            wrong += [f"{case}: engine"] if digest_layout(target, local) != expected else []
            full = dict(plain.named_parameters())
            with torch.no_grad():
                for parameter in full.values():
                    parameter[..., ::9] *= -1.5
                for key, sharded in model.named_parameters():
                    part, box = local_part(sharded)
                    part.copy_(full[key][slices_of(box)])
        wrong += [f"{case}: {full_ranks}"] if full_ranks else []
    return wrong


@pytest.mark.parametrize("cases", [[3], pytest.param([0, 1, 2, 4], marks=pytest.mark.slow)], ids=["some", "others"])
def test_experts_over_ep_reach_engines_bit_for_bit_and_so_do_differences(
    four_ranks: RankPool, cases: list[int]
) -> None:
    results: list[Any] = four_ranks.run(_synced, cases)
    assert results == [[]] * 4
