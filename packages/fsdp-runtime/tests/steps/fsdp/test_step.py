"""FSDP2: what is gathered when, and that ``unsharded`` gathers once and puts everything back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_runtime import FSDP2, MeshSpec, parallelize, unsharded
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool


def _model(**options: Any) -> nn.Module:
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    return parallelize(tiny_model("Qwen3ForCausalLM", num_hidden_layers=3), mesh, **options)


def _gathers(model: nn.Module, *, backward: bool = False) -> int:
    """How many all-gathers one forward (and backward) takes."""
    inputs = tiny_inputs(model, batch=2, length=5)
    with CommDebugMode() as communication, torch.set_grad_enabled(backward):
        loss = model(**inputs, use_cache=False).logits.sum()
        if backward:
            loss.backward()
    return sum(count for kind, count in communication.get_comm_counts().items() if "gather" in str(kind))


def _sharded_bytes(model: nn.Module) -> int:
    """The bytes of all parameters as the module holds them now: shards, or gathered tensors."""
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(local.untyped_storage().nbytes() for local in locals_)


def _gathers_of_a_step() -> tuple[int, int]:
    return _gathers(_model(), backward=True), _gathers(_model(fsdp=FSDP2(reshard_after_forward=False)), backward=True)


def test_the_last_block_and_the_root_are_gathered_once_a_step(two_ranks: RankPool) -> None:
    # Three blocks and the root in forward; backward gathers the first two blocks again.
    assert two_ranks.run(_gathers_of_a_step)[0] == (4 + 2, 4)


def _gathers_around_unsharded() -> dict[str, Any]:
    model = _model()
    sharded = _sharded_bytes(model)
    found: dict[str, Any] = {"before": _gathers(model)}
    with unsharded(model):
        found["inside"] = [_gathers(model), _gathers(model)]
        found["growth"] = _sharded_bytes(model) / sharded
        with unsharded(model):
            pass
        found["after nested"] = _gathers(model)
    found["shrunk"] = _sharded_bytes(model) == sharded
    found["after"] = _gathers(model)
    try:
        with unsharded(model):
            raise RuntimeError("planted")
    except RuntimeError:
        found["after error"] = _gathers(model)
    found["trains"] = _gathers(model, backward=True)
    return found


def test_unsharded_gathers_nothing_per_call_and_restores_everything(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_gathers_around_unsharded):
        growth = found.pop("growth")
        assert growth == pytest.approx(2, rel=0.02)
        # A forward without gradients leaves nothing gathered, so the step takes as many as a first one.
        assert found == {
            "before": 4,
            "inside": [0, 0],
            "after nested": 0,
            "shrunk": True,
            "after": 4,
            "after error": 4,
            "trains": 4 + 2,
        }


def _outputs_inside_and_outside() -> float:
    model = _model()
    inputs = tiny_inputs(model, batch=2, length=5)
    with torch.no_grad():
        outside = model(**inputs).logits
        with unsharded(model):
            inside = model(**inputs).logits
    return (inside - outside).abs().max().item()


def test_unsharded_does_not_change_the_output(two_ranks: RankPool) -> None:
    assert two_ranks.run(_outputs_inside_and_outside) == [0.0, 0.0]


def test_unsharded_leaves_a_plain_model_alone() -> None:
    model = nn.Linear(2, 2)
    with unsharded(model) as same:
        assert same is model


def _offloaded_devices() -> tuple[set[str], int]:
    model = _model(fsdp=FSDP2(offload_policy=CPUOffloadPolicy()))
    _gathers(model, backward=True)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    return {p.grad.device.type for p in model.parameters()}, units


def test_offloaded_gradients_and_optimizer_live_on_the_cpu(two_ranks: RankPool) -> None:
    assert two_ranks.run(_offloaded_devices)[0] == ({"cpu"}, 4)


class _Stage(nn.Module):
    """A container without a forward, whose layers the model calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)


class _Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([_Stage() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = x + stage.down(stage.up(x).relu())  # type: ignore[operator, union-attr]
        return x


def _staged_errors() -> float:
    torch.manual_seed(0)
    plain = _Staged().double()
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    sharded = parallelize(copy.deepcopy(plain), mesh, activation_checkpointing="block")
    rows = torch.arange(12).view(2, 6).double()
    for model in (plain, sharded):
        model(rows).square().sum().backward()
    pairs = zip(plain.parameters(), sharded.parameters(), strict=True)
    return max((p.grad - s.grad.full_tensor()).abs().max().item() for p, s in pairs)  # type: ignore[operator, union-attr]


def test_blocks_without_a_forward_are_gathered_with_the_root(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(_staged_errors)) < 1e-12


def _of_own_rows() -> list[float]:
    """Errors of logits with rotary embeddings that grow with a rank's longest row, in rows of several lengths."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    plain = tiny_model("LlamaForCausalLM", max_position_embeddings=8, head_dim=8, rope_parameters=rope)
    model = parallelize(copy.deepcopy(plain), MeshSpec(dp_shard=2).build(device_type="cpu"))
    errors = []
    for length in ((6, 12), (20, 7), (5, 5)):
        own = tiny_inputs(plain, batch=1, length=length[dist.get_rank()])
        wanted, found = (each(**own, use_cache=False).logits for each in (plain, model))
        errors.append((found - wanted).abs().max().item())
    return errors


def test_rotary_embeddings_follow_the_longest_row_of_a_rank(two_ranks: RankPool) -> None:
    for errors in two_ranks.run(_of_own_rows):
        assert max(errors) < 1e-6
