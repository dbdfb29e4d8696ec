"""Trainable parameters of several dtypes in one FSDP module are refused before the model changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_runtime import FSDPOptions, MeshSpec, OptionError, meta_device, parallelize
from fsdp_runtime.nemo import fsdp2_strategy_parallelize
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = torch.sigmoid(self.gate(x.to(self.gate.weight.dtype)))
        return self.up(gates.to(self.up.weight.dtype))


class _Model(nn.Module):
    """A bfloat16 model whose gates stay in float32."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block() for _ in range(2)])
        self.to(torch.bfloat16)
        for layer in self.layers:
            layer.gate.float()
            layer.up.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _ernie() -> nn.Module:
    import transformers

    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=0,
    )
    with meta_device():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _unchanged(model: nn.Module) -> bool:
    wrapped = any(isinstance(module, FSDPModule) for module in model.modules())
    return not wrapped and not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("policy", [POLICY, MixedPrecisionPolicy()], ids=["mixed_precision", "stored_dtype"])
def test_dtypes_that_fsdp2_would_refuse_at_the_first_forward_are_refused_with_names(policy: Any) -> None:
    model, mesh = _Model(), MeshSpec().build(device_type="cpu")
    names = r"layers\.0 with layers\.0\.gate\.weight in torch\.float32 and layers\.0\.up\.weight in torch\.bfloat16"
    with pytest.raises(OptionError, match=rf"2 have several; the first is {names}: .*master_dtype=torch\.float32"):
        parallelize(model, mesh, fsdp=FSDPOptions(mp_policy=policy))
    assert _unchanged(model)
    with pytest.raises(OptionError, match=names):
        fsdp2_strategy_parallelize(model, mesh, policy)
    assert _unchanged(model)


def test_a_transformers_model_on_meta_that_keeps_gates_in_float32_is_refused() -> None:
    model = _ernie()
    with pytest.raises(OptionError, match=r"model\.layers\.0\.mlp\.gate\.weight in torch\.float32"):
        parallelize(model, MeshSpec().build(device_type="cpu"), fsdp=FSDPOptions(mp_policy=POLICY))
    assert _unchanged(model)


def test_master_weights_make_the_dtypes_uniform_and_the_model_trains() -> None:
    options = FSDPOptions(master_dtype=torch.float32, mp_policy=POLICY)
    model = parallelize(_Model(), MeshSpec().build(device_type="cpu"), fsdp=options)
    model(torch.ones(1, 4)).float().sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}


def test_frozen_parameters_of_another_dtype_are_accepted_as_under_float32_adapters() -> None:
    policy = MixedPrecisionPolicy()
    model = parallelize(_Model(frozen=True), MeshSpec().build(device_type="cpu"), fsdp=FSDPOptions(mp_policy=policy))
    model(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum().backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


def test_without_fsdp2_dtypes_may_differ() -> None:
    assert isinstance(parallelize(_Model(), MeshSpec().build(device_type="cpu")), _Model)


def _adapters_on_transformers() -> dict[str, Any]:
    """The largest relative difference of an adapter's gradient from one process, and the dtypes."""
    from peft import LoraConfig, get_peft_model

    base = tiny_model("LlamaForCausalLM", dtype=torch.bfloat16)
    plain = get_peft_model(base, LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))
    model = copy.deepcopy(plain)
    parallelize(
        model, MeshSpec(dp_shard=2).build(device_type="cpu"), fsdp=FSDPOptions(mp_policy=MixedPrecisionPolicy())
    )
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
