"""Parameters in another dtype than their model's keep it under FSDP2, with the result of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_runtime import FSDP2, MeshSpec, load_training_state, parallelize, save_training_state, stream_weights
from fsdp_runtime._transformers_compat.dtypes import kept_in_float32
from fsdp_runtime.steps.fsdp import dtypes as fsdp_dtypes
from fsdp_runtime.steps.fsdp import step as fsdp
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool, RanksFailed

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


WIDTH = 16


class _Block(nn.Module):
    """A gate and a scale in float32 inside bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = torch.sigmoid(self.gate(x.to(self.gate.weight.dtype))).mean(-1, keepdim=True)
        return self.up((x * gates * self.scale).to(self.up.weight.dtype))


class _Model(nn.Module):
    """A bfloat16 model whose gates and scales stay in float32."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block() for _ in range(2)])
        self.to(torch.bfloat16)
        for layer in self.layers:
            layer.gate.float()
            layer.scale.data = layer.scale.data.float()
            layer.up.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items() if g is not None}


def _inputs(rank: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    return torch.randn(3, WIDTH, generator=generator).bfloat16()


def _loss(model: nn.Module, rank: int, micro_batch: int) -> torch.Tensor:
    loss: torch.Tensor = model(_inputs(rank, micro_batch)).float().sum()
    return loss


def _means_of_two_ranks(axes: dict[str, int], folder: str) -> list[str]:
    """Names of what differs from one process by more than the rounding of a sum of four."""
    problems = []
    default = fsdp_dtypes.SHARDED_FROM
    for shards, policy in ((False, None), (False, POLICY), (True, MixedPrecisionPolicy()), (True, POLICY)):
        torch.manual_seed(0)
        plain = _Model()
        fsdp_dtypes.SHARDED_FROM = 1 if shards else default
        mesh = MeshSpec(**axes).build(device_type="cpu")
        model = parallelize(copy.deepcopy(plain), mesh, fsdp=FSDP2(mp_policy=policy))
        assert isinstance(model, FSDPModule)
        own = isinstance(model.layers[0].gate, FSDPModule)
        if own != shards:
            problems.append(f"a gate is {'' if own else 'not '}an FSDP module")
        rank = torch.distributed.get_rank()
        for micro_batch in range(2):
            model.set_requires_gradient_sync(micro_batch == 1)
            _loss(model, rank, micro_batch).backward()
            for each in range(2):
                (_loss(plain, each, micro_batch) / 2).backward()
        expected, found = _gradients(plain), _gradients(model)
        for name, wanted in expected.items():
            error = (found[name].float() - wanted.float()).norm() / wanted.float().norm()
            bound = 1e-6 if wanted.dtype == torch.float32 else 2**-6  # bfloat16 sums of four in another order
            if found[name].dtype != wanted.dtype or not error <= bound:
                problems.append(f"{name}: {found[name].dtype}, off by {error:.1e}")
        if {name: each.dtype for name, each in stream_weights(model)} != {
            n: p.dtype for n, p in plain.named_parameters()
        }:
            problems.append("names or dtypes of streamed weights")
        problems += _resumed(model, plain, mesh, policy, f"{folder}/{shards}-{policy is POLICY}")
    fsdp_dtypes.SHARDED_FROM = default
    return problems


def _resumed(model: nn.Module, plain: nn.Module, mesh: Any, policy: Any, folder: str) -> list[str]:
    """Take a step, save, and load into a model with other values."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    save_training_state(folder, model, optimizer, step=1)
    other = copy.deepcopy(plain)
    nn.init.ones_(other.layers[0].scale)
    other = parallelize(other, mesh, fsdp=FSDP2(mp_policy=policy))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    load_training_state(folder, other, fresh)
    problems = []
    for (name, saved), loaded in zip(model.named_parameters(), other.parameters(), strict=True):
        moments = (optimizer.state[saved]["exp_avg"], fresh.state[loaded]["exp_avg"])
        for one, two in ((saved, loaded), moments):
            local = [each.to_local() if isinstance(each, DTensor) else each for each in (one, two)]
            if not torch.equal(*local):
                problems.append(f"{name} differs after resuming")
    return problems


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"dp_shard": 2}, id="shards"),
        pytest.param({"dp_replicate": 2}, id="replicas", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_have_the_gradients_of_one_process_and_resume(
    two_ranks: RankPool, axes: dict[str, int], tmp_path: Any
) -> None:
    assert two_ranks.run(_means_of_two_ranks, axes, str(tmp_path)) == [[], []]


def test_a_gradient_that_is_not_reduced_would_be_seen(two_ranks: RankPool, tmp_path: Any) -> None:
    with pytest.raises(RanksFailed, match="have different gradients on the ranks of dp_shard, as they are not reduced"):
        two_ranks.run(_without_reduction, str(tmp_path))


def _without_reduction(folder: str) -> None:
    original = fsdp.reduce_gradients
    fsdp.reduce_gradients = lambda *_: None
    try:
        _means_of_two_ranks({"dp_shard": 2}, folder)
    finally:
        fsdp.reduce_gradients = original


def test_master_weights_are_float32_and_gates_compute_in_float32() -> None:
    options = FSDP2(master_dtype=torch.float32, mp_policy=POLICY)
    torch.manual_seed(0)
    plain = _Model()
    model = parallelize(copy.deepcopy(plain), MeshSpec().build(device_type="cpu"), fsdp=options)
    found, expected = model(_inputs(0, 0)), plain(_inputs(0, 0))
    assert torch.equal(found, expected)
    found.float().sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}


def test_frozen_parameters_of_another_dtype_are_accepted_as_under_float32_adapters() -> None:
    policy = MixedPrecisionPolicy()
    model = parallelize(_Model(frozen=True), MeshSpec().build(device_type="cpu"), fsdp=FSDP2(mp_policy=policy))
    model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().sum().backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


def _adapters_on_transformers() -> dict[str, Any]:
    """The largest relative difference of an adapter's gradient from one process, and the dtypes."""
    from peft import LoraConfig, get_peft_model

    base = tiny_model("LlamaForCausalLM", dtype=torch.bfloat16)
    plain = get_peft_model(base, LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))
    model = copy.deepcopy(plain)
    parallelize(model, MeshSpec(dp_shard=2).build(device_type="cpu"), fsdp=FSDP2(mp_policy=MixedPrecisionPolicy()))
    inputs = tiny_inputs(base, batch=2, length=7)
    for each in (plain, model):
        each(**inputs, use_cache=False).logits.float().square().mean().backward()
    worst = 0.0
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        if expected.requires_grad:
            difference = (actual.grad.full_tensor() - expected.grad).norm() / expected.grad.norm()
            worst = max(worst, difference.item())
    dtypes = {str(p.dtype) for p in model.parameters() if p.requires_grad}
    return {
        "worst": worst,
        "trained": dtypes,
        "frozen": {str(p.dtype) for p in base.parameters() if not p.requires_grad},
    }


def test_float32_adapters_of_peft_train_on_a_bfloat16_model_of_transformers(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_adapters_on_transformers):
        assert found["trained"] == {"torch.float32"}
        assert found["frozen"] == {"torch.bfloat16"}
        assert found["worst"] < 1e-6  # both compute in bfloat16 by the same operators, and reduce in float32


def test_what_a_model_declares_is_found_inside_a_wrapper() -> None:
    model = tiny_model("Qwen3ForCausalLM", num_hidden_layers=1)
    model._keep_in_fp32_modules_strict = {"q_norm"}  # type: ignore[assignment]
    name = "model.layers.0.self_attn.q_norm.weight"
    assert kept_in_float32(model) == {name}
    assert kept_in_float32(nn.ModuleDict({"policy": model})) == {f"policy.{name}"}
