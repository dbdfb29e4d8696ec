"""A base in packed bytes under adapters: outputs and gradients of one process with the dequantized base."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from coverage.multimodal import multimodal_model
from coverage.multimodal_inputs import multimodal_inputs
from coverage.packing import packed_positions
from coverage.table import entries
from coverage.table import tiny_model as tiny_row
from fsdp_runtime import load_adapter, load_weights, parallelize, sequence_layout, stream_weights
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.sharded.boxes import block_view, slices_of
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.steps import Quantized
from fsdp_runtime.sync import ModelShards
from fsdp_runtime.weights.quantize.packed import packed_weights
from harness.models import tiny_model
from harness.parity import GRADIENT_BOUND, OUTPUT_BOUND, gradient_errors, logits_of, mesh_for
from harness.ranks import RankPool

#: Documents of two packed rows.
_ROWS = ((5, 4, 3), (3, 9))
Case = tuple[str, Mapping[str, int], Mapping[str, Any]]


def _model(name: str) -> nn.Module:
    if name == "vision":
        return multimodal_model("qwen2_5_vl")
    return tiny_row(entries()[name]) if name in entries() else tiny_model(name)


def _adapted(name: str) -> Any:
    torch.manual_seed(7)
    config = peft.LoraConfig(r=2, lora_alpha=5, target_modules="all-linear")
    model: Any = peft.get_peft_model(_model(name), config, autocast_adapter_dtype=False).double()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@lru_cache(maxsize=1)
def _rounded(name: str, step: Quantized) -> Any:
    """An adapted model with the values of the quantized base; to quantize it changes no value."""
    model = _adapted(name)
    quantized = parallelize(copy.deepcopy(model), mesh_for({"tp": dist.get_world_size()}), plan=None, steps=(step,))
    for path, module in quantized.named_modules():
        for each, weight in packed_weights(module).items():
            values = weight.dequantize(module.get_parameter(each))
            assert 0 < (values - model.get_submodule(path).get_parameter(each)).abs().max() < 0.3
            model.get_submodule(path).get_parameter(each).data = values.contiguous()
    return model


def _inputs(name: str, model: Any, *, packed: bool) -> dict[str, Tensor]:
    if name == "vision":
        return multimodal_inputs(model.get_base_model(), seed=1)
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, **({"position_ids": packed_positions(_ROWS)} if packed else {})}


def _errors(step: Quantized, cases: list[Case]) -> dict[str, float]:
    """The errors beyond the bounds on this rank, by case and tensor."""
    found: dict[str, float] = {}
    for name, axes, options in cases:
        plain = copy.deepcopy(_rounded(name, step))
        inputs = _inputs(name, plain, packed=bool(options.get("packed_sequences")))
        mesh = mesh_for(axes)
        sharded = parallelize(copy.deepcopy(plain), mesh, **options, steps=(step,))
        alone = mesh_for({"tp": dist.get_world_size()}) if options.get("packed_sequences") else None
        if alone is not None:
            plain = parallelize(plain, alone, plan=None, packed_sequences=True)
        expected = logits_of(plain, inputs)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=expected.dtype)
        (expected * weights).sum().backward()
        parts = {**inputs, "weights": weights, "expected": expected.detach()}
        if "cp" in axes:
            layout = sequence_layout(mesh, expected.shape[1])
            parts = {key: layout.shard(each) if each.ndim > 1 else each for key, each in parts.items()}
        actual = logits_of(sharded, {key: parts[key] for key in inputs})
        # Every rank of dp_shard has the same rows, so that FSDP2's mean is the gradient of one process.
        (actual * parts["weights"]).sum().backward()
        gradients = {each: parameter.grad for each, parameter in plain.named_parameters()}
        case = f"{name} {dict(axes)} {dict(options)}"
        off = (actual - parts["expected"]).abs().max().item()
        found |= {f"{case} logits": off} if not off <= OUTPUT_BOUND else {}
        errors = gradient_errors(gradients, sharded)
        found |= {f"{case} {each}": error for each, error in errors.items() if not error <= GRADIENT_BOUND}
        assert any("lora_" in each for each in errors)
        assert not all(parameter.is_floating_point() for parameter in sharded.parameters())
    return found


_TWO: list[Case] = [
    ("LlamaForCausalLM", {"tp": 2}, {"sequence_parallel": True, "activation_checkpointing": "block"}),
    ("LlamaForCausalLM", {"cp": 2}, {}),
    ("Qwen3MoeForCausalLM", {"tp": 2}, {"sequence_parallel": True}),
    ("Qwen3MoeForCausalLM", {"dp_shard": 2, "ep": 2}, {"activation_checkpointing": "block"}),
    ("GptOssForCausalLM", {"tp": 2, "ep": 2}, {}),
    ("qwen3_next", {"dp_shard": 2}, {"packed_sequences": True}),
    ("vision", {"tp": 2}, {}),
]
_BOTH = {"dp_shard": 2, "tp": 2}
_FOUR: list[Case] = [
    ("LlamaForCausalLM", _BOTH, {"sequence_parallel": True, "packed_sequences": True}),
    ("LlamaForCausalLM", {"cp": 2, "tp": 2}, {"context_parallel": "ring", "activation_checkpointing": "selective"}),
    ("Qwen3MoeForCausalLM", {**_BOTH, "ep": 4}, {"packed_sequences": True}),
    ("Qwen3MoeForCausalLM", {"dp_shard": 4}, {"activation_checkpointing": "mlp"}),
    ("GptOssForCausalLM", {**_BOTH, "ep": 2}, {"activation_checkpointing": "block"}),
    ("qwen3_next", _BOTH, {"sequence_parallel": True}),
    ("deepseek_v3", {**_BOTH, "ep": 2}, {"sequence_parallel": True}),
    ("granitemoehybrid", _BOTH, {}),
    ("vision", _BOTH, {}),
]


def test_quantized_computes_one_process_with_the_dequantized_base(two_ranks: RankPool) -> None:
    assert two_ranks.run(_errors, Quantized("nf4", block_size=16), _TWO) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"), [*zip(("nf4", "int8", "fp8", "mxfp4", "int4") * 2, _FOUR, strict=False)], ids=str
)
def test_quantized_computes_one_process_on_four_ranks(kind: Any, case: Case, four_ranks: RankPool) -> None:
    assert four_ranks.run(_errors, Quantized(kind, block_size=16), [case]) == [{}] * 4


_KINDS: tuple[Any, ...] = ("nf4", "int4", "int8", "fp8", "mxfp4")
_ROWS_OF_MODELS = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "qwen3_next", "vision")
_SP = {"sequence_parallel": True}


def _meshes(name: str, ranks: int) -> list[Case]:
    """Every axis and product of axes that the model and the number of ranks allow."""
    two: list[Any] = [
        ({"tp": 2}, {}),
        ({"tp": 2}, _SP),
        ({"dp_shard": 2}, {}),
        ({"dp_replicate": 2}, {}),
        ({"cp": 2}, {}),
    ]
    four: list[Any] = [
        *(({"dp_shard": 2, "tp": 2}, options) for options in ({}, _SP)),
        *(({"dp_replicate": 2, axis: 2}, {}) for axis in ("dp_shard", "tp")),
        *(({"cp": 2, axis: 2}, {}) for axis in ("dp_shard", "tp")),
    ]
    experts: list[Any] = [({"dp_shard": 2, "ep": 2}, {}), ({"tp": 2, "ep": 2}, {})]
    experts_of_four: list[Any] = [({"dp_shard": 4, "ep": 2}, {}), ({"dp_shard": 2, "tp": 2, "ep": 4}, _SP)]
    has_experts = name in ("Qwen3MoeForCausalLM", "qwen3_next")
    cases = (two, four)[ranks == 4] + (experts, experts_of_four)[ranks == 4] * has_experts
    # The inputs of the model with images lack positions, which cp needs.
    return [(name, axes, options) for axes, options in cases if "cp" not in axes or name != "vision"]


@pytest.mark.slow
@pytest.mark.parametrize("name", _ROWS_OF_MODELS)
@pytest.mark.parametrize("kind", _KINDS)
def test_quantized_computes_one_process_on_every_mesh_of_two(kind: Any, name: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(_errors, Quantized(kind, block_size=16), _meshes(name, 2)) == [{}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", _ROWS_OF_MODELS)
@pytest.mark.parametrize("kind", _KINDS)
def test_quantized_computes_one_process_on_every_mesh_of_four(kind: Any, name: str, four_ranks: RankPool) -> None:
    assert four_ranks.run(_errors, Quantized(kind, block_size=16), _meshes(name, 4)) == [{}] * 4


def _differences(name: str, step: Quantized, axes: Mapping[str, int], directory: str) -> list[str]:
    """The tensors that differ after a load by slices, in an export, and in the shards of a weight sync."""
    rounded = _rounded(name, step)
    plain = parallelize(copy.deepcopy(rounded), mesh_for({"tp": dist.get_world_size()}), plan=None, steps=(step,))
    sharded = parallelize(copy.deepcopy(rounded).to("meta"), mesh_for(axes), steps=(step,))
    load_adapter(sharded, directory)
    load_weights(sharded, f"{directory}/base", strict=True)
    entries = state_entries(sharded)
    loaded = dict(
        zip([each.names[0] for each in entries], full_tensors([each.tensor for each in entries]), strict=True)
    )
    wrong = [each for each, tensor in plain.state_dict().items() if not torch.equal(loaded[each], tensor)]
    exported = dict(stream_weights(sharded))
    merged = dict(stream_weights(copy.deepcopy(rounded).merge_and_unload()))
    wrong += [each for each, tensor in merged.items() if not torch.allclose(exported[each], tensor, rtol=0, atol=1e-14)]
    shards = ModelShards(sharded)
    shards.refresh()
    for each, tensor in exported.items():
        for block in shards.layout.blocks(each):
            if block.rank == dist.get_rank():
                view = block_view(shards.local, each, block, block.box)
                wrong += [] if torch.equal(view, tensor[slices_of(block.box)]) else [f"{each} {block}"]
    return wrong


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_quantized_is_loaded_by_slices_and_exported(name: str, tmp_path: Path, four_ranks: RankPool) -> None:
    step = Quantized("mxfp4", block_size=16)
    _adapted(name).save_pretrained(tmp_path)
    _model(name).double().save_pretrained(tmp_path / "base")
    axes = {"dp_shard": 2, "tp": 2, **({"ep": 2} if name == "Qwen3MoeForCausalLM" else {})}
    assert four_ranks.run(_differences, name, step, axes, str(tmp_path)) == [[]] * 4


def _gpt_oss_differences(directory: str) -> list[str]:
    """The experts with other values than transformers gives the codes of a checkpoint as OpenAI stores it."""
    model = _model("GptOssForCausalLM").requires_grad_(False).to("meta")
    sharded = parallelize(model, mesh_for({"tp": 2}), steps=(Quantized("mxfp4"),))
    load_weights(sharded, directory, strict=True)
    stored = load_file(f"{directory}/model.safetensors")
    loaded = dict(stream_weights(sharded, dtype=torch.bfloat16))
    codes = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    assert len(codes) == 4
    expected = {name: convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"]) for name in codes}
    return [name for name, values in expected.items() if not torch.equal(loaded[name], values)]


def test_quantized_takes_the_codes_of_gpt_oss(tmp_path: Path, two_ranks: RankPool) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in _model("GptOssForCausalLM").state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16)).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 130, (experts, rows, columns // 32)).to(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert two_ranks.run(_gpt_oss_differences, str(tmp_path)) == [[], []]
