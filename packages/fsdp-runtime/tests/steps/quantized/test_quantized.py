"""``Quantized``: its layers keep packed bytes only, and its checks name the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fsdp_runtime import MeshSpec, describe_parallelism, load_training_state, parallelize, save_training_state
from fsdp_runtime.errors import ConversionError, MismatchError, ModelError, OptionError
from fsdp_runtime.steps import Compile, Quantized
from fsdp_runtime.sync import ModelShards
from fsdp_runtime.weights.quantize.packed import BLOCKS, PackedFormat, PackedWeight
from harness.memory import LiveBytes
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

_STEP = Quantized("nf4", block_size=16)


def _adapted(architecture: str, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"r": 2, "target_modules": "all-linear", **options}
    model: Any = peft.get_peft_model(
        tiny_model(architecture), peft.LoraConfig(**options), autocast_adapter_dtype=False
    ).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _alone(model: nn.Module, **options: Any) -> Any:
    return parallelize(model, MeshSpec().build(device_type="cpu"), **{"steps": (_STEP,), **options})


@pytest.mark.parametrize("kind", BLOCKS)
def test_packed_format_keeps_its_own_values_in_any_part(kind: Any) -> None:
    torch.manual_seed(0)
    fmt = PackedFormat.of(kind, None)
    weight = torch.randn(6, 4 * fmt.block) * torch.logspace(-3, 2, 6)[:, None]
    weight[2, : fmt.block] = 0
    packed = fmt.quantize(weight)
    values = fmt.dequantize(packed, torch.float32)
    assert (values - weight).norm(dim=1).div(weight.norm(dim=1)).max() < {"nf4": 0.11, "mxfp4": 0.14, "int4": 0.12}.get(
        kind, 0.03
    )
    assert torch.equal(fmt.dequantize(fmt.quantize(values), torch.float32), values)
    part = packed[1:4, fmt.block_bytes : 3 * fmt.block_bytes]
    assert torch.equal(fmt.dequantize(part, torch.float32), values[1:4, fmt.block : 3 * fmt.block])
    assert torch.equal(fmt.quantize(weight[1:4, fmt.block : 3 * fmt.block]), part)
    turned = PackedWeight(fmt, (2, 2 * fmt.block, 6), torch.float32, transposed=True)
    stack = weight.T.reshape(2, 2 * fmt.block, 6)
    assert torch.equal(turned.dequantize(turned.quantize(stack)).reshape(-1, 6), values.T)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_quantized_layers_keep_packed_bytes_only(architecture: str) -> None:
    """Also adapted experts: backward adds their adapters again."""
    model = _alone(_adapted(architecture))
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.extend([tensor] * (tensor.untyped_storage().data_ptr() not in known))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**tiny_inputs(model, batch=1, length=3)).logits.square().sum()
    assert kept
    assert max(tensor.untyped_storage().nbytes() for tensor in kept) < 8 * 32 * 64  # the smallest weight
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    with LiveBytes() as memory:
        loss = model(**tiny_inputs(model, batch=1, length=3)).logits.square().sum()
    assert memory.live < 8 * 32 * 64 * 8  # the smallest stack, in float64
    loss.backward()


def test_compiled_quantized_layers_keep_packed_bytes_only() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))]))
    model.requires_grad_(False)
    block = _alone(model, compile=Compile({"backend": "aot_eager_decomp_partition", "fullgraph": True}))[0][0]
    kept: list[int] = []
    tensor = torch.randn(2, 64, requires_grad=True)
    with saved_tensors_hooks(lambda each: kept.append(each.numel() * (each.dtype != torch.uint8)) or each, lambda x: x):  # type: ignore[func-returns-value]
        block(tensor).sum().backward()
    assert 0 < max(kept) < 64 * 64
    weights = [PackedFormat("nf4", 16).dequantize(block[each].weight, torch.float32) for each in (0, 2)]
    hidden = torch.tanh(nn.functional.linear(tensor, weights[0], block[0].bias))
    expected = ((1 - hidden**2) * weights[1].sum(0)) @ weights[0]
    assert torch.allclose(tensor.grad, expected, atol=1e-5)  # type: ignore[arg-type]


def test_quantized_computes_in_the_dtype_of_its_input() -> None:
    model = _alone(nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(64, 8))])).requires_grad_(False))
    layer: Any = model[0][0][0]
    assert layer(torch.ones(1, 64)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(1, 64)).dtype == torch.bfloat16
    with pytest.raises(ModelError, match=r"got an input of torch.uint8: .* name the layer in Quantized\(keep"):
        layer(torch.ones(1, 64, dtype=torch.uint8))


def test_describe_parallelism_lists_the_layers_left_alone() -> None:
    model = _alone(_adapted("Qwen3MoeForCausalLM"), steps=(Quantized("int8", 16, keep=("*.q_proj",)),))
    report = describe_parallelism(model)
    assert set(report.quantized.values()) == {"int8, blocks of 16"}
    reasons = {name.partition("layers.1.")[2] or name: reason for name, reason in report.not_quantized.items()}
    assert reasons["self_attn.q_proj.weight"] == "its name matches *.q_proj"
    assert reasons["mlp.gate.weight"] == "it is no linear layer or stack of a block"
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(report.not_quantized)
    assert "weights in packed bytes: int8, blocks of 16" in str(report)


def test_quantized_shards_take_no_values_of_a_transfer() -> None:
    shards = ModelShards(_alone(nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(64, 8))])).requires_grad_(False)))
    with pytest.raises(ConversionError, match="take no values of a transfer"):
        shards.local["0.0.0.weight"][2:4].copy_(torch.zeros(2, 64))


@pytest.mark.parametrize(
    ("model", "step", "message"),
    [
        (lambda: tiny_model("LlamaForCausalLM"), _STEP, r"finds no weight .*q_proj.weight: it trains.*freeze the base"),
        (
            lambda: _adapted("LlamaForCausalLM"),
            Quantized("nf4", block_size=128),
            r"64 columns are not a multiple of block_size=128",
        ),
        (lambda: _adapted("LlamaForCausalLM", use_dora=True), _STEP, r"q_proj carries adapters .*use_dora=False"),
    ],
)
def test_quantized_refuses_models(model: Any, step: Quantized, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        _alone(model(), steps=(step,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int2"}, "Quantized format='int2': write one of 'nf4', 'int4', 'int8', 'fp8', 'mxfp4'"),
        ({"format": "nf4", "block_size": 7}, "block_size=7: give an even number of elements, such as 64"),
        ({"format": "nf4", "keep": "lm_head"}, "keep='lm_head': give a tuple of patterns"),
    ],
)
def test_quantized_refuses_options(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Quantized(**options)


def _refusal() -> str:
    model = _adapted("LlamaForCausalLM")
    with pytest.raises(OptionError) as error:
        parallelize(model, mesh_for({"tp": 2}), steps=(Quantized("nf4", block_size=32),))
    assert not any(parameter.dtype == torch.uint8 for parameter in model.parameters())
    return str(error.value)


def test_quantized_refuses_shards_that_cut_a_block(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_refusal):
        assert "down_proj.base_layer.weight has 96 columns, and each of tp=2 ranks computes with 48 of them" in message
        assert "use a block_size that divides 48" in message


def test_quantized_training_state_does_not_fit_another_format(tmp_path: Path) -> None:
    """Bytes of int8 and FP8 have one shape."""
    models = [
        _alone(nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(64, 8))])).requires_grad_(False), steps=(step,))
        for step in (Quantized("int8", 32), Quantized("fp8", 32))
    ]
    assert models[0][0][0][0].weight.shape == models[1][0][0][0].weight.shape
    save_training_state(tmp_path, models[0], step=1)
    with pytest.raises(MismatchError, match=r"int8 of shape .* was saved, the model has uint8"):
        load_training_state(tmp_path, models[1])
    load_training_state(tmp_path, models[0])
