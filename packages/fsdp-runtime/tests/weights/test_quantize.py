"""Low precision: the bits of a reference, sharded and not, streamed and saved, with scales under known names."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fsdp_runtime import OptionError, parallelize, save_weights, stream_weights
from fsdp_runtime.sharded.hashing import hash_bits
from fsdp_runtime.sync import Quantization, WeightExport
from fsdp_runtime.weights.quantize.formats import FP8_MAX
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

FORMATS = ("fp8", "fp8_block", "mxfp8", "nvfp4")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _weight(seed: int, rows: int = 256, columns: int = 384) -> Tensor:
    """Rows of very different magnitudes, ties of e2m1, signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 4, (rows, 1), generator=generator).float()
    weight = (torch.randn(rows, columns, generator=generator) * 10**exponents).to(torch.bfloat16)
    weight[3] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(columns // 8)
    weight[4], weight[5, :5] = -weight[3], -0.0
    return weight


def _dequantized(kind: str, parts: tuple[Tensor, ...]) -> Tensor:
    """Element times scale, written from the definition of each format."""
    if kind == "fp8":
        return parts[0].float() * parts[1]
    if kind == "fp8_block":
        scales = parts[1].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return parts[0].float() * scales[: parts[0].shape[0], : parts[0].shape[1]]
    if kind == "mxfp8":
        return parts[0].float() * 2.0 ** (parts[1].float() - 127).repeat_interleave(32, 1)
    codes = torch.stack([parts[0] & 15, parts[0] >> 4], -1).flatten(-2).long()
    values = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    return values * parts[1].float().repeat_interleave(16, 1) * parts[2]


@pytest.mark.parametrize("kind", FORMATS)
def test_dequantized_values_are_within_half_a_step_of_the_weight(kind: Any) -> None:
    weight = _weight(0)
    restored = _dequantized(kind, Quantization(format=kind).quantize(weight)).to(torch.float64)
    group = {"fp8": weight.numel(), "fp8_block": 0, "mxfp8": 32, "nvfp4": 16}[kind]
    if group:
        amax = weight.double().abs().reshape(-1, group).amax(1).repeat_interleave(group).view(weight.shape)
    else:
        amax = weight.double().abs().view(2, 128, 3, 128).amax((1, 3))
        amax = amax.repeat_interleave(128, 0).repeat_interleave(128, 1)
    # Half a step of the largest binade: 1/16 of it in e4m3 (1/8 where MX rounds the scale down and clamps), 1/6 in
    # e2m1, and there the rounding of the scale, and the least scale of a group.
    least = weight.double().abs().max() / (448 * 6) * 2**-6 * 6 if kind == "nvfp4" else 0
    bound = {"nvfp4": 1 / 6 + 0.07, "mxfp8": 1 / 8}.get(kind, 1 / 16)
    assert ((restored - weight.double()).abs() <= bound * amax.clamp(min=least)).all()


#: Hashes of what torchao 0.18.0 makes of `_weight(seed)`: values, then scales.
REFERENCE: dict[str, list[list[int]]] = {
    "fp8": [[-6220179266947647165, 1975067810348002688], [6633244720405933268, 3461225797536696299]],
    "fp8_block": [[-747724719193253658, -3947434849473139441], [-6849847316313870527, 61988812967925716]],
    "mxfp8": [[-4798879318162910355, -1790845413818547969], [1297629178042076630, -2638200630002383840]],
    "nvfp4": [
        [-7809814938897208195, -3091801271193702476, 1699854163430266315],
        [6382953161652933296, -3562121142161025265, 5606399664146683988],
    ],
}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_bits_are_those_of_torchao(kind: Any) -> None:
    for seed in range(2):
        parts = Quantization(format=kind).quantize(_weight(seed))
        assert [int(hash_bits(part)) for part in parts] == REFERENCE[kind][seed]


def test_blocks_at_the_ends_may_be_smaller_and_zeros_stay_zeros() -> None:
    weight = _weight(1)
    whole, scales = Quantization(format="fp8_block").quantize(weight)
    part, part_scales = Quantization(format="fp8_block").quantize(weight[:130, :260])
    assert torch.equal(part.float()[:128, :256], whole.float()[:128, :256])
    assert part_scales.shape == (2, 3)
    assert torch.equal(part_scales[:1, :2], scales[:1, :2])
    assert part_scales[1, 2] == weight[128:130, 256:260].float().abs().max() / FP8_MAX
    for kind in FORMATS:
        quantization = Quantization(format=kind)
        assert _dequantized(kind, quantization.quantize(torch.zeros(128, 128))).eq(0).all()


class _Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 256)
        self.up_proj = nn.Linear(256, 384)
        self.mlp = nn.ModuleDict({"gate": nn.Linear(256, 8, bias=False)})
        self.norm = nn.LayerNorm(256)


def test_linear_layers_are_quantized_and_all_else_is_in_bfloat16() -> None:
    names = {
        weight.name: weight.dtype for weight in WeightExport(quantize=Quantization(format="nvfp4")).describe(_Linears())
    }
    assert names.pop("up_proj.weight") == torch.uint8
    assert names.pop("up_proj.weight_scale") == torch.float8_e4m3fn
    assert names.pop("up_proj.weight_scale_2") == torch.float32
    assert set(names) == {"embed_tokens.weight", "up_proj.bias", "mlp.gate.weight", "norm.weight", "norm.bias"}
    assert set(names.values()) == {torch.bfloat16}
    kept = Quantization(format="nvfp4", keep=("up_proj.*",))
    assert {weight.dtype for weight in WeightExport(quantize=kept).describe(_Linears())} == {torch.bfloat16}


def test_what_cannot_be_cut_into_groups_and_unknown_formats_are_refused() -> None:
    with pytest.raises(OptionError, match=r"weight has 24 input features, not a multiple of the 32"):
        WeightExport(quantize=Quantization(format="mxfp8")).describe(nn.Linear(24, 4))
    with pytest.raises(OptionError, match="format='int4': write one of fp8"):
        Quantization(format="int4")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"keep='lm_head': give a tuple of patterns"):
        Quantization(format="fp8", keep="lm_head")  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["fp8", "", False, True, {"format": "fp8"}, torch.float8_e4m3fn, Quantization])
def test_quantize_names_the_formats_where_it_is_no_quantization(word: Any, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: save_weights(_Linears(), tmp_path / "saved", quantize=word),
        lambda: list(stream_weights(_Linears(), quantize=word)),
        lambda: WeightExport(quantize=word),
    ]
    for call in calls:
        with pytest.raises(OptionError, match="one of fp8, fp8_block, mxfp8, nvfp4"):
            call()
    assert list(tmp_path.iterdir()) == []


def _streamed(kind: Any, path: Path) -> list[str]:
    """Parts that a sharded model streams or saves otherwise than one process quantizes its full weights."""
    quantization, wrong = Quantization(format=kind), []
    plain = tiny_model("Qwen3ForCausalLM", dtype=torch.float32, num_hidden_layers=1)
    expected = dict(stream_weights(plain, quantize=quantization))
    full = dict(stream_weights(plain))
    model = parallelize(copy.deepcopy(plain), mesh_for({"dp_shard": 2, "tp": 2}))
    described = WeightExport(quantize=quantization).describe(model)
    for name, tensor in stream_weights(model, quantize=quantization, bucket_bytes=20_000):
        info = described.pop(0)
        if (info.name, info.shape, info.dtype) != (name, tuple(tensor.shape), tensor.dtype):
            wrong.append(f"metadata of {name}")
        if not torch.equal(
            torch.atleast_1d(tensor).view(torch.uint8), torch.atleast_1d(expected[name]).view(torch.uint8)
        ):
            wrong.append(name)
    buckets = dict(pair for bucket in WeightExport(quantize=quantization).buckets(model) for pair in bucket)
    wrong += [name for name in expected if not torch.equal(buckets[name].float(), expected[name].float())]
    for name, tensor in full.items():
        if quantization.parts(name, tensor.shape):
            parts = tuple(expected[part.name] for part in quantization.parts(name, tensor.shape))
            if not torch.equal(parts[0].float(), quantization.quantize(tensor)[0].float()):
                wrong.append(f"values of {name}")
        elif not torch.equal(expected[name], tensor.bfloat16()):
            wrong.append(f"{name} is not bfloat16's")
    save_weights(model, path / kind, quantize=quantization)
    stored = load_file(path / kind / "model.safetensors")
    wrong += [name for name in expected if not torch.equal(stored[name].float(), expected[name].float())]
    return wrong


def test_a_sharded_model_streams_and_saves_what_one_process_quantizes(four_ranks: RankPool, tmp_path: Path) -> None:
    for kind in FORMATS:
        assert four_ranks.run(_streamed, kind, tmp_path) == [[]] * 4
        config = json.loads((tmp_path / kind / "config.json").read_text())
        assert config["dtype"] == "bfloat16"
        quantization = config["quantization_config"]
        kept = quantization.get("modules_to_not_convert") or quantization.get("ignore")
        assert kept == ["model.embed_tokens", "lm_head"]
    block = json.loads((tmp_path / "fp8_block" / "config.json").read_text())["quantization_config"]
    assert (block["quant_method"], block["weight_block_size"]) == ("fp8", [128, 128])


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_transformers_loads_a_checkpoint_in_blocks(architecture: str, tmp_path: Path) -> None:
    # transformers derives the size of blocks from the number of scales: sides are 64 or multiples of 128.
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1}
    model = tiny_model(architecture, dtype=torch.float32, **sizes)
    quantization = Quantization(format="fp8_block")
    save_weights(model, tmp_path / "blocks", quantize=quantization)
    save_weights(model, tmp_path / "plain", dtype=torch.bfloat16)
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    for name, tensor in stream_weights(model):
        if quantization.parts(name, tensor.shape):
            expected[name] = _dequantized("fp8_block", quantization.quantize(tensor)).to(torch.bfloat16)
    save_file(expected, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    load = transformers.AutoModelForCausalLM.from_pretrained
    found, wanted = (load(tmp_path / kind, dtype=torch.bfloat16).state_dict() for kind in ("blocks", "plain"))
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
