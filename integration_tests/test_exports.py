"""Exports in bfloat16 against ``from_pretrained`` and ``save_pretrained``: dtypes, routes, adapters merged exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from coverage.shrink import VOCAB
from coverage.table import entries, tiny_model
from fsdp_runtime import parallelize, record_routes, save_weights, stream_weights
from fsdp_runtime._transformers_compat.dtypes import kept_dtypes
from fsdp_runtime.sharded.hashing import hash_bits
from fsdp_runtime.sync import ModelShards, Quantization, WeightExport, digest
from fsdp_runtime.sync.execute import box_views
from harness import models
from harness.parity import mesh_for
from harness.ranks import RankPool
from tp_plans.boxes import full_box

#: One architecture for each way in which a class keeps a dtype: patterns for buffers and parameters, a buffer and a
#: parameter that the constructor makes in float32, norms.
MECHANISMS = ["glm4_moe", "lfm2_moe", "hunyuan_v1_moe", "deepseek_v4"]
#: Mixtures that choose experts by scores plus a trained bias.
ROUTING_BIASES = [
    *["afmoe", "axk1", "bailing_hybrid", "beam", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe"],
    *["glm4_moe_lite", "hy_v3", "kolibri1", "lfm2_moe", "mimo_v2_flash", "nemotron_h", "solar_open"],
]
#: Further architectures with tensors in float32.
FLOAT32_PARTS = ["deepseek_v2", "flint", "hy_v4", "kimi_linear", "olmo_hybrid", "hunyuan_v1_moe", "deepseek_v4"]
FORMATS = (None, "fp8", "fp8_block")


def _choice(names: list[str], quick: list[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in dict.fromkeys(names)]


def _model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The tiny model of an architecture; routing biases lie near 8, where bfloat16 has steps of 0.06."""
    model = tiny_model(entries()[name], dtype=torch.float32)
    torch.manual_seed(3)
    for path, tensor in model.state_dict().items():
        if path.endswith(("e_score_correction_bias", "expert_bias", "moe_statics")):
            tensor.copy_(8 + 0.03 * torch.randn_like(tensor))
    return model.to(dtype)


def _load(name: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    cls = getattr(transformers, entries()[name].class_name)
    options = {"experts_implementation": "eager"} if cls._can_set_experts_implementation() else {}
    return cls.from_pretrained(directory, dtype=dtype, **options)


@pytest.mark.parametrize("name", _choice(ROUTING_BIASES + FLOAT32_PARTS, MECHANISMS))
def test_exports_have_the_dtypes_that_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    model = _model(name)
    model.save_pretrained(tmp_path / "float32")
    for dtype in (torch.bfloat16, torch.float16):
        _load(name, tmp_path / "float32", dtype).save_pretrained(tmp_path / "plain")
        expected = {key: tensor.dtype for key, tensor in load_file(tmp_path / "plain" / "model.safetensors").items()}
        assert {torch.float32, dtype} <= set(expected.values())
        save_weights(model, tmp_path / "ours", dtype=dtype)
        saved = load_file(tmp_path / "ours" / "model.safetensors")
        assert {key: tensor.dtype for key, tensor in saved.items()} == expected
        assert {key: tensor.dtype for key, tensor in stream_weights(model, dtype=dtype)} == expected
        assert {weight.name: weight.dtype for weight in WeightExport(dtype=dtype).describe(model)} == expected
        tensors = ModelShards(model, export=WeightExport(dtype=dtype)).layout.tensors
        assert {key: getattr(torch, tensor.dtype) for key, tensor in tensors.items()} == expected
    assert {weight.dtype for weight in WeightExport().describe(model)} <= {torch.float32, torch.int64}


def test_dtypes_that_a_class_keeps_are_found_inside_wrappers() -> None:
    model = _model("lfm2_moe")
    bias = next(name for name, _ in model.named_buffers() if name.endswith("expert_bias"))
    assert kept_dtypes(model, model.state_dict(), torch.bfloat16) == {bias: torch.float32}
    assert kept_dtypes(model, model.state_dict(), torch.float32) == {}
    wrapped = nn.ModuleDict({"policy": model})
    described = {weight.name: weight.dtype for weight in WeightExport(dtype=torch.bfloat16).describe(wrapped)}
    assert [name for name, dtype in described.items() if dtype == torch.float32] == [f"policy.{bias}"]


def test_building_the_reference_changes_no_random_numbers_and_no_config() -> None:
    model, state = _model("glm4_moe"), torch.get_rng_state()
    config = model.config.to_dict()
    WeightExport(dtype=torch.bfloat16).describe(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert torch.get_default_dtype() == torch.float32


def test_layers_that_a_class_keeps_in_float32_are_not_quantized() -> None:
    model = _model("hunyuan_v1_moe")
    for dtype in (None, torch.float32):
        export = WeightExport(dtype=dtype, quantize=Quantization(format="fp8"))
        routers = [weight for weight in export.describe(model) if ".gate.wg." in weight.name]
        assert {weight.dtype for weight in routers} == {torch.float32}
        assert not any("scale" in weight.name for weight in routers)
        assert ModelShards(model, export=export).layout.tensors[routers[0].name].dtype == "float32"


def _routes(model: Any) -> Tensor:
    tokens = torch.randint(3, VOCAB, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), record_routes(model) as routes:
        model(tokens, use_cache=False)
    return torch.cat([chosen.sort(-1)[0].flatten() for chosen in routes.values()])


def _differing(name: str, path: Path) -> list[str]:
    """The ways out of a sharded model by which tokens come to other experts than in one process."""
    plain = _load(name, path)
    expected, wrong = _routes(plain), []
    model = parallelize(_load(name, path), mesh_for({"dp_shard": 2}))
    save_weights(model, path / "saved", dtype=torch.bfloat16)
    for way, weights in {
        "saved": dict(stream_weights(_load(name, path / "saved"))),
        "streamed": dict(stream_weights(model, dtype=torch.bfloat16)),
    }.items():
        received = dict(stream_weights(plain))
        wrong += [f"{way} {key}" for key in received.keys() ^ weights.keys()]
        wrong += [f"{way} {key}" for key in received.keys() & weights.keys() if not _same(received[key], weights[key])]
    if not torch.equal(_routes(_load(name, path / "saved")), expected):
        wrong.append("routes")
    return wrong + _not_in_shards(model, WeightExport(dtype=torch.bfloat16))


@pytest.mark.parametrize("name", _choice(ROUTING_BIASES, ["glm4_moe", "lfm2_moe"]))
def test_tokens_choose_the_same_experts_after_an_export(two_ranks: RankPool, name: str, tmp_path: Path) -> None:
    _model(name).save_pretrained(tmp_path)
    assert two_ranks.run(_differing, name, tmp_path) == [[]] * 2


def _same(one: Tensor, other: Tensor) -> bool:
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def _not_in_shards(model: nn.Module, export: WeightExport) -> list[str]:
    """Weights of which this rank's shards, or the digest, differ from the full tensors of a stream."""
    shards, wrong = ModelShards(model, export=export), []
    shards.refresh()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    full = dict(export.stream(model))
    for name, tensor in full.items():
        for part, view in box_views(shards.layout, rank, shards.local, name, full_box(tensor.shape)):
            if not _same(view.to(tensor.dtype), tensor[tuple(slice(*side) for side in part)]):
                wrong.append(f"shard of {name}")
    hashes = {name: int(hash_bits(tensor)) for name, tensor in full.items()}
    return [*wrong, *(["digests"] if digest(model, export=export) != hashes else [])]


def _fill(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.02)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 1e-3)


#: Class and settings of one LoRA config per adapter.
ADAPTERS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "plain": ("Qwen3ForCausalLM", [{"target_modules": ["q_proj", "down_proj"]}]),
    "rank-stabilised": ("Qwen3ForCausalLM", [{"target_modules": ["o_proj", "lm_head"], "use_rslora": True}]),
    "two": ("Qwen3ForCausalLM", [{"target_modules": ["q_proj"]}, {"target_modules": ["q_proj", "up_proj"]}]),
    "saved": ("Qwen3ForCausalLM", [{"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "k_proj"]}]),
    "experts": (
        "Qwen3MoeForCausalLM",
        [{"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}],
    ),
}


def _adapted(kind: str, dtype: torch.dtype) -> Any:
    architecture, settings = ADAPTERS[kind]
    base = models.tiny_model(architecture, dtype=torch.float32)
    configs = [peft.LoraConfig(r=3, lora_alpha=5, **each) for each in settings]
    model: Any = peft.get_peft_model(base, configs[0])
    for number, config in enumerate(configs[1:]):
        model.add_adapter(f"adapter_{number}", config)
    model.base_model.set_adapter(list(model.peft_config))
    torch.manual_seed(4)
    _fill(model)
    return model.to(dtype)


def _merged_wrongly(kind: str, dtype: torch.dtype, axes: dict[str, int]) -> list[str]:
    """Weights that differ from a merge in float64 that is rounded once."""
    exact = copy.deepcopy(_adapted(kind, dtype)).double()
    exact = exact.merge_and_unload(adapter_names=list(exact.peft_config))
    expected = dict(stream_weights(exact))
    model = parallelize(_adapted(kind, dtype), mesh_for(axes))
    wrong = []
    for name, tensor in stream_weights(model, dtype=torch.bfloat16):
        differing = (tensor != expected.pop(name).bfloat16()).float().mean()
        if differing > 1e-3:  # a sum in float32 and one in float64 may lie on two sides of a tie
            wrong.append(f"{name}: {differing:.1%}")
    for kind_of_number in FORMATS:
        quantize = None if kind_of_number is None else Quantization(format=kind_of_number)  # type: ignore[arg-type]
        wrong += _not_in_shards(model, WeightExport(dtype=torch.bfloat16, quantize=quantize))
    return wrong + list(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 4, "ep": 4}], ids=str
)
def test_adapters_are_merged_exactly_on_four_ranks(four_ranks: RankPool, axes: dict[str, int]) -> None:
    assert four_ranks.run(_merged_wrongly, "experts", torch.bfloat16, axes) == [[]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", _choice([*ADAPTERS], ["two", "experts"]))
def test_adapters_are_merged_exactly_and_rounded_once(two_ranks: RankPool, kind: str, dtype: torch.dtype) -> None:
    axes = {"dp_shard": 2} if kind == "saved" else {"tp": 2}
    assert two_ranks.run(_merged_wrongly, kind, dtype, axes) == [[]] * 2


def test_modules_that_an_adapter_trains_in_full_keep_the_dtype_of_their_class() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_a_proj"], modules_to_save=["gate"])
    model: Any = peft.get_peft_model(_model("deepseek_v3"), config)
    shards = ModelShards(model, export=WeightExport(dtype=torch.bfloat16), adapter="default")
    dtypes = {name: tensor.dtype for name, tensor in shards.layout.tensors.items()}
    assert {dtypes[name] for name in dtypes if name.endswith("mlp.gate.weight")} == {"float32"}
    assert {dtypes[name] for name in dtypes if ".lora_" in name} == {"bfloat16"}
