"""FSDP2's CPU offload in a training step: clipping and the optimizer work on the shards where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_runtime import FSDP2, parallelize
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from rl_logprobs import clip_grad_norm_


def _trained(mesh: dict[str, int], **options: Any) -> tuple[list[torch.Tensor], torch.Tensor, set[str]]:
    """Local parameters after a clipped step, the norm before clipping, and where gradients and states were."""
    model = parallelize(tiny_model("Qwen3ForCausalLM"), mesh_for(mesh), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits.sum().backward()
    norm = clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    devices = {value.device.type for value in (*states, *(p.grad for p in model.parameters()))}
    return [p.to_local().detach().clone() for p in model.parameters()], norm, devices


def _offloaded_and_not(mesh: dict[str, int]) -> dict[str, Any]:
    expected, norm, _ = _trained(mesh)
    actual, offloaded_norm, devices = _trained(mesh, fsdp=FSDP2(offload_policy=CPUOffloadPolicy()))
    return {
        "same": all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True)),
        "norms": (float(norm), float(offloaded_norm)),
        "devices": devices,
        "norm on": offloaded_norm.device.type,
    }


@pytest.mark.parametrize(
    "mesh",
    [{"dp_shard": 2, "tp": 2}, pytest.param({"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_an_offloaded_step_equals_the_step_without_offload(four_ranks: RankPool, mesh: dict[str, int]) -> None:
    for found in four_ranks.run(_offloaded_and_not, mesh):
        one, other = found.pop("norms")
        assert one == pytest.approx(other, rel=1e-12)
        assert one > 0.5  # it was clipped
        assert found == {"same": True, "devices": {"cpu"}, "norm on": "cpu"}
