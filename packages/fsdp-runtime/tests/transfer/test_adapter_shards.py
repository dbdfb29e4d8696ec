"""The factors of an adapter alone, from shards to a receiver, under peft's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import tp_plans
from fsdp_runtime import ModelShards, OptionError, WeightSync, digest_layout, parallelize, save_adapter
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from tp_plans import Replicate


def _adapted() -> Any:
    model = tiny_model("Qwen3ForCausalLM", dtype=torch.float32)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj", "up_proj"])
    wrapped: Any = peft.get_peft_model(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return wrapped


def _received(path: Path) -> list[str]:
    """Factors that differ from the saved adapter on a rank that stores all of them, after a full update and a delta."""
    model = parallelize(_adapted(), mesh_for({"dp_shard": 2, "tp": 2}))
    shards = ModelShards(model, adapter="default")
    tensors = shards.layout.tensors
    target = tp_plans.mesh_layout(tensors, (4,), {name: [Replicate()] for name in tensors})
    local = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    plan = tp_plans.plan_transfer(shards.layout, target)
    sync = WeightSync(plan, source=shards.local, destination=local)
    sync.update(0)
    with torch.no_grad():
        for tensor in shards.local.values():
            tensor.mul_(2)
    sync.update(1)
    save_adapter(model, path)
    dist.barrier()
    saved = load_file(path / "adapter_model.safetensors")
    wrong = sorted(saved.keys() ^ local.keys())
    wrong += [name for name in saved.keys() & local.keys() if not torch.equal(saved[name], local[name])]
    if digest_layout(shards.layout, shards.local) != digest_layout(target, local):
        wrong.append("digests")
    return wrong


def test_an_adapter_reaches_a_receiver_alone_and_bit_for_bit(four_ranks: RankPool, tmp_path: Path) -> None:
    assert four_ranks.run(_received, tmp_path) == [[]] * 4


def test_a_model_with_adapters_is_refused_without_a_choice() -> None:
    with pytest.raises(OptionError, match=r"q_proj\.weight has active adapters.*send them alone \(adapter=\)"):
        ModelShards(_adapted())
    with pytest.raises(OptionError, match="has no adapter 'other'"):
        ModelShards(_adapted(), adapter="other")
