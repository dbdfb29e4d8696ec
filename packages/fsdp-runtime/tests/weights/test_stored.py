"""Quantized checkpoints: their codes in a packed base, and their values in other models, on any mesh."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp_runtime import MeshSpec, load_weights, parallelize, save_weights, stream_weights
from fsdp_runtime.errors import ConversionError
from fsdp_runtime.steps import Quantized
from fsdp_runtime.sync import Quantization
from fsdp_runtime.weights.quantize.packed import NF4
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from tp_plans import ColwiseParallel, RowwiseParallel

_NAMES = ("0.0.0.weight", "0.0.1.weight")
_SHAPES = ((192, 256), (256, 192))


def _model() -> nn.Module:
    layers = [nn.Linear(256, 192, bias=False), nn.Linear(192, 256, bias=False)]
    return nn.Sequential(nn.ModuleList([nn.Sequential(*layers)])).requires_grad_(False)


def _nf4(name: str, shape: tuple[int, int], *, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """As bitsandbytes stores it: flat codes, the first in the high half, with scales of 64."""
    codes, levels = torch.randint(16, shape), torch.tensor(NF4)
    flat = codes.view(-1).to(torch.uint8)
    count = flat.numel() // 64
    state: dict[str, Any] = {"shape": list(shape), "blocksize": 64, "quant_type": "nf4", "dtype": "bfloat16"}
    stored = {name: ((flat[::2] << 4) | flat[1::2])[:, None], f"{name}.quant_map": levels}
    amax = torch.rand(count) + 0.5
    if nested:
        state |= {"nested_blocksize": 256, "nested_offset": 0.25, "nested_dtype": "float32"}
        outer, inner = torch.rand(-(-count // 256)) + 0.5, torch.linspace(-1, 1, 256)
        stored[f"{name}.absmax"] = torch.randint(256, (count,)).to(torch.uint8)
        stored |= {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": inner}
        amax = inner[stored[f"{name}.absmax"].int()] * outer.repeat_interleave(256)[:count] + 0.25
    else:
        stored[f"{name}.absmax"] = amax
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    stored[f"{name}.quant_state.bitsandbytes__nf4"] = text
    return stored, (levels[codes].view(-1, 64) * amax[:, None]).view(shape)


def _int8(name: str, shape: tuple[int, int], *, bitsandbytes: bool) -> tuple[dict[str, Tensor], Tensor]:
    codes, scale = torch.randint(-127, 128, shape).to(torch.int8), torch.rand(shape[0]) + 0.5
    if bitsandbytes:
        stored = {name: codes, name.replace("weight", "SCB"): scale}
        return stored | {name.replace("weight", "weight_format"): torch.tensor(0, dtype=torch.uint8)}, codes * (
            scale / 127
        )[:, None]
    return {name: codes, f"{name}_scale": scale[:, None]}, codes * scale[:, None]


def _fp8(name: str, shape: tuple[int, int], *, blocks: bool) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    if not blocks:
        scale = torch.tensor(0.3)
        return {name: codes, f"{name}_scale": scale}, codes.float() * scale
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
    full = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    return {name: codes, f"{name}_scale_inv": scales}, codes.float() * full


_SCHEMES: dict[str, tuple[Any, dict[str, bool], str]] = {
    "bitsandbytes nf4": (_nf4, {"nested": False}, "nf4"),
    "bitsandbytes nf4, nested": (_nf4, {"nested": True}, "nf4"),
    "bitsandbytes int8": (_int8, {"bitsandbytes": True}, "int8"),
    "compressed-tensors int8": (_int8, {"bitsandbytes": False}, "int8"),
    "fp8 blocks": (_fp8, {"blocks": True}, "fp8"),
    "fp8 tensor": (_fp8, {"blocks": False}, "fp8"),
}


def _checkpoint(directory: Path, scheme: str) -> dict[str, Tensor]:
    """Save two weights in a scheme; return their values."""
    torch.manual_seed(3)
    make, options, _ = _SCHEMES[scheme]
    stored: dict[str, Tensor] = {}
    values = {}
    for name, shape in zip(_NAMES, _SHAPES, strict=True):
        parts, values[name] = make(name, shape, **options)
        stored |= parts
    directory.mkdir(parents=True)
    save_file(stored, directory / "model.safetensors")
    return values


def _off(directory: str, values: dict[str, dict[str, Tensor]]) -> list[str]:
    """The schemes with other values after a load over ``tp``, packed or not."""
    plan = {"0.0.0": ColwiseParallel(), "0.0.1": RowwiseParallel()}
    wrong = []
    for scheme, expected in values.items():
        for steps in ((Quantized(_SCHEMES[scheme][2], block_size=32),), ()):  # type: ignore[arg-type]
            model = parallelize(_model().to("meta"), mesh_for({"tp": 2}), plan=plan, steps=steps)
            load_weights(model, f"{directory}/{scheme}", strict=True)
            loaded = dict(stream_weights(model))
            wrong += [f"{scheme} {name}" for name in _NAMES if not torch.equal(loaded[name], expected[name])]
    return wrong


def test_load_weights_keeps_the_values_of_quantized_checkpoints(tmp_path: Path, two_ranks: RankPool) -> None:
    values = {scheme: _checkpoint(tmp_path / scheme, scheme) for scheme in _SCHEMES}
    assert two_ranks.run(_off, str(tmp_path), values) == [[], []]


def _of_empty_shards(directory: str) -> list[str]:
    """Load, run and stream a layer with fewer rows than ranks."""
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 1, bias=False))
    model = nn.Sequential(nn.ModuleList([layers])).requires_grad_(False)
    save_weights(model, directory)
    step = Quantized("nf4", block_size=32)
    sharded = parallelize(copy.deepcopy(model).to("meta"), mesh_for({"dp_shard": 2}), plan=None, steps=(step,))
    load_weights(sharded, directory)
    streamed = dict(stream_weights(sharded))
    alone = parallelize(model, mesh_for({"tp": 2}), plan=None, steps=(step,))
    tensor = torch.ones(2, 64)
    assert torch.equal(sharded[0][0](tensor), alone[0][0](tensor))  # type: ignore[index]
    return [name for name, weight in stream_weights(alone) if not torch.equal(weight, streamed[name])]


def test_load_weights_fills_empty_shards_of_a_packed_base(tmp_path: Path, two_ranks: RankPool) -> None:
    assert two_ranks.run(_of_empty_shards, str(tmp_path)) == [[], []]


def test_load_weights_keeps_codes_of_merged_experts_and_saves_no_quantized_config(tmp_path: Path) -> None:
    """The checkpoint has one matrix for each expert, and the model one stack of all."""
    model: Any = tiny_model("Qwen3MoeForCausalLM").requires_grad_(False)
    save_weights(model, tmp_path / "fp8", quantize=Quantization(format="fp8_block"))
    load_weights(model, tmp_path / "fp8", strict=True)
    expected = dict(stream_weights(model))
    packed = parallelize(
        copy.deepcopy(model), MeshSpec().build(device_type="cpu"), steps=(Quantized("fp8", block_size=16),)
    )
    with torch.no_grad():
        for parameter in packed.parameters():
            parameter.zero_()
    load_weights(packed, tmp_path / "fp8", strict=True)
    for name, loaded in stream_weights(packed):
        assert torch.equal(loaded, expected[name]), name
    packed.config.quantization_config = {"quant_method": "fp8"}
    save_weights(packed, tmp_path / "bf16", dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())


def test_load_weights_quantizes_codes_of_another_format(tmp_path: Path) -> None:
    values = _checkpoint(tmp_path / "fp8", "fp8 blocks")
    model = parallelize(_model(), MeshSpec().build(device_type="cpu"), steps=(Quantized("nf4"),))
    load_weights(model, tmp_path / "fp8")
    for name, loaded in stream_weights(model):
        assert 0 < (loaded - values[name]).norm() / values[name].norm() < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.0.0.weight_packed": torch.zeros(2)}, "0.0.0.weight_packed .* is of a scheme that is not read"),
        (
            {f"{_NAMES[0]}_scale_inv": torch.zeros(3, 2)},
            r"has scales \(3, 2\), .* need \(2, 2\)",
        ),
    ],
)
def test_load_weights_refuses_unknown_schemes(changes: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    stored, _ = _fp8(_NAMES[0], _SHAPES[0], blocks=True)
    save_file({**stored, **changes}, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match=message):
        load_weights(_model(), tmp_path)
