"""Quantized checkpoints: their codes in a packed base, and their values in other models, on any mesh."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, MappingType
from torchao.quantization.granularity import PerGroup
from transformers import TorchAoConfig

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


def _int8(
    name: str, shape: tuple[int, int], *, bitsandbytes: bool = False, zeros: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    codes, scale = torch.randint(-127, 128, shape).to(torch.int8), torch.rand(shape[0]) + 0.5
    if bitsandbytes:
        stored = {name: codes, name.replace("weight", "SCB"): scale}
        return stored | {name.replace("weight", "weight_format"): torch.tensor(0, dtype=torch.uint8)}, codes * (
            scale / 127
        )[:, None]
    zeros = torch.randint(-20, 20, (shape[0], 1)).to(torch.int8) * zeros
    stored = {name: codes, f"{name}_scale": scale[:, None], f"{name}_zero_point": zeros}
    return stored, (codes.int() - zeros) * scale[:, None]


def _fp8(name: str, shape: tuple[int, int], *, blocks: bool) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    if not blocks:
        scale = torch.tensor(0.3)
        return {name: codes, f"{name}_scale": scale}, codes.float() * scale
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
    full = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    return {name: codes, f"{name}_scale_inv": scales}, codes.float() * full


def _words(integers: Tensor, dim: int, *, bits: int = 4, order: tuple[int, ...] = ()) -> Tensor:
    """Pack integers into words of 32 bits along a dim, the first of ``order`` in the lowest bits."""
    count = 32 // bits
    split = integers.movedim(dim, -1).long().unflatten(-1, (-1, count))[..., list(order or range(count))]
    words = (split << torch.arange(count) * bits).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int().movedim(-1, dim).contiguous()


def _groups(shape: tuple[int, int], bits: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes ``[out, in]``, scales and zeros ``[out, groups]`` for 64 columns each, and the values."""
    codes, count = torch.randint(2**bits, shape), shape[1] // 64
    scales, zeros = (torch.rand(shape[0], count) + 0.5).half(), torch.randint(2**bits, (shape[0], count))
    centered = codes.unflatten(1, (count, 64)) - zeros[..., None]
    return codes, scales, zeros, (centered * scales.double()[..., None]).flatten(1).float()


def _gptq(name: str, shape: tuple[int, int], *, bits: int = 4, added: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """As AutoGPTQ stores it: words along the inputs, zeros one too low, of words too; every group has its columns."""
    layer, (codes, scales, zeros, values) = name.removesuffix("weight"), _groups(shape, bits)
    low = _words(zeros.T, 1, bits=bits).long() - added * sum(1 << bits * place for place in range(32 // bits))
    stored = {f"{layer}qweight": _words(codes.T, 0, bits=bits), f"{layer}scales": scales.T.contiguous()}
    stored[f"{layer}qzeros"] = torch.where(low < -(2**31), low + 2**32, low).int()
    return stored | {f"{layer}g_idx": (torch.arange(shape[1]) // 64).int()}, values


def _awq(name: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """As AutoAWQ's ``gemm`` stores it: words along the outputs."""
    layer, (codes, scales, zeros, values) = name.removesuffix("weight"), _groups(shape)
    words, low = (_words(each.T, 1, order=(0, 2, 4, 6, 1, 3, 5, 7)) for each in (codes, zeros))
    return {f"{layer}qweight": words, f"{layer}qzeros": low, f"{layer}scales": scales.T.contiguous()}, values


def _compressed_int4(name: str, shape: tuple[int, int], *, symmetric: bool) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, values = _groups(shape)
    stored = {f"{name}_packed": _words(codes, 1), f"{name}_scale": scales, f"{name}_shape": torch.tensor(shape)}
    if not symmetric:
        return stored | {f"{name}_zero_point": _words(zeros, 0)}, values
    return stored, ((codes.unflatten(1, (-1, 64)) - 8) * scales.double()[..., None]).flatten(1).float()


def _torchao_int4(name: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """As ``Int4Tensor`` has it: signed codes, two per byte, and zeros that are floats."""
    layer, codes = name.removesuffix("weight"), torch.randint(-8, 8, shape)
    scales, zeros = torch.rand(2, shape[0], shape[1] // 64).bfloat16()
    values = (codes.unflatten(1, (-1, 64)) * scales.double()[..., None] + zeros.double()[..., None]).flatten(1)
    parts = {
        "qdata": (codes[:, ::2] & 15 | codes[:, 1::2] << 4).to(torch.int8),
        "scale": scales.T,
        "zero_point": zeros.T,
    }
    return {f"{layer}_weight_{part}": each.contiguous() for part, each in parts.items()}, values.float()


_SCHEMES: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "bitsandbytes nf4": (_nf4, {"nested": False}, "nf4"),
    "bitsandbytes nf4, nested": (_nf4, {"nested": True}, "nf4"),
    "bitsandbytes int8": (_int8, {"bitsandbytes": True}, "int8"),
    "compressed-tensors int8": (_int8, {}, "int8"),
    "compressed-tensors int8, zeros": (_int8, {"zeros": True}, None),
    "fp8 blocks": (_fp8, {"blocks": True}, "fp8"),
    "fp8 tensor": (_fp8, {"blocks": False}, "fp8"),
    "gptq": (_gptq, {}, "int4"),
    "gptq_v2": (_gptq, {"added": 0}, "int4"),
    "awq": (_awq, {}, "int4"),
    "compressed-tensors int4": (_compressed_int4, {"symmetric": True}, "int4"),
    "compressed-tensors int4, zeros": (_compressed_int4, {"symmetric": False}, "int4"),
    "torchao int4": (_torchao_int4, {}, "int4"),
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
    config = {"quantization_config": {"quant_method": scheme, "checkpoint_format": scheme}}
    (directory / "config.json").write_text(json.dumps(config))
    return values


def _off(directory: str, values: dict[str, dict[str, Tensor]]) -> list[str]:
    """The schemes with other values after a load over ``tp``, packed or not."""
    plan = {"0.0.0": ColwiseParallel(), "0.0.1": RowwiseParallel()}
    wrong = []
    for scheme, expected in values.items():
        kind: Any = _SCHEMES[scheme][2]
        for steps in ((), *([(Quantized(kind, block_size=32),)] if kind else [])):
            model = parallelize(_model().to("meta"), mesh_for({"tp": 2}), plan=plan, steps=steps)
            load_weights(model, f"{directory}/{scheme}", strict=True)
            loaded = dict(stream_weights(model))
            wrong += [f"{scheme} {name}" for name in _NAMES if not torch.equal(loaded[name], expected[name])]
    return wrong


def test_load_weights_keeps_the_values_of_quantized_checkpoints(tmp_path: Path, two_ranks: RankPool) -> None:
    values = {scheme: _checkpoint(tmp_path / scheme, scheme) for scheme in _SCHEMES}
    assert two_ranks.run(_off, str(tmp_path), values) == [[], []]


_TORCHAO = {
    "int8": (Int8WeightOnlyConfig(), "int8"),
    "int8 groups": (Int8WeightOnlyConfig(granularity=PerGroup(32)), "int8"),
    "fp8": (Float8WeightOnlyConfig(), "fp8"),
    "zeros": (IntxWeightOnlyConfig(torch.int4, PerGroup(32), mapping_type=MappingType.ASYMMETRIC), None),
}


def _off_of_torchao(directory: str, values: dict[str, dict[str, Tensor]]) -> list[str]:
    """The schemes with other values after a load over ``tp``."""
    wrong = []
    for scheme, expected in values.items():
        kind: Any = _TORCHAO[scheme][1]
        for steps in ((), *([(Quantized(kind, block_size=16),)] if kind else [])):
            model: Any = tiny_model("LlamaForCausalLM").float().requires_grad_(False)
            load_weights(
                parallelize(model.to("meta"), mesh_for({"tp": 2}), steps=steps), f"{directory}/{scheme}", strict=True
            )
            loaded = dict(stream_weights(model))
            wrong += [f"{scheme} {name}" for name in loaded if not torch.equal(loaded[name], expected[name])]
    return wrong


def test_load_weights_keeps_the_values_of_torchaos_checkpoints(tmp_path: Path, two_ranks: RankPool) -> None:
    model: Any = tiny_model("LlamaForCausalLM").float()
    model.save_pretrained(tmp_path / "float32")
    values = {}
    for scheme, (config, _) in _TORCHAO.items():
        quantized = type(model).from_pretrained(tmp_path / "float32", quantization_config=TorchAoConfig(config))
        quantized.save_pretrained(tmp_path / scheme)
        state = quantized.state_dict()
        values[scheme] = {name: each.dequantize() if type(each) is not Tensor else each for name, each in state.items()}
        assert sum(not torch.equal(each, model.state_dict()[name]) for name, each in values[scheme].items()) == 14
    assert two_ranks.run(_off_of_torchao, str(tmp_path), values) == [[], []]


def test_load_weights_reads_groups_of_scattered_columns(tmp_path: Path) -> None:
    """GPTQ with ``desc_act`` lists the group of each column; its codes fit no packed format."""
    values = _checkpoint(tmp_path / "gptq", "gptq")
    file, order = tmp_path / "gptq/model.safetensors", torch.randperm(256)
    stored = load_file(file)
    stored["0.0.0.g_idx"] = stored["0.0.0.g_idx"][order].contiguous()
    words = _words(_unpacked(stored["0.0.0.qweight"])[order], 0)
    save_file({**stored, "0.0.0.qweight": words}, file)
    expected = {**values, _NAMES[0]: values[_NAMES[0]][:, order]}
    for steps in ((), (Quantized("int4", block_size=32),)):
        model = parallelize(_model(), MeshSpec().build(device_type="cpu"), steps=steps)
        load_weights(model, tmp_path / "gptq", strict=True)
        for name, loaded in stream_weights(model):
            error = (loaded - expected[name]).norm() / expected[name].norm()
            assert error < 0.1 if steps and name == _NAMES[0] else error == 0


def _with_groups(directory: Path, scheme: str, groups: Tensor) -> dict[str, Tensor]:
    """Save a checkpoint with groups of columns beside its first weight."""
    values, file = _checkpoint(directory, scheme), directory / "model.safetensors"
    name = "0.0.0.g_idx" if "gptq" in scheme else "0.0.0.weight_g_idx"
    save_file({**load_file(file), name: groups.int()}, file)
    return values


def _refusals_of_groups(directory: str) -> list[bool]:
    """Load groups that the scales lack over ``tp``; nothing of the model changes."""
    plan = {"0.0.0": ColwiseParallel(), "0.0.1": RowwiseParallel()}
    model = parallelize(_model(), mesh_for({"tp": 2}), plan=plan)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for folder in sorted(Path(directory).iterdir()):
        with pytest.raises(ConversionError, match=r"g_idx has groups \[.*\], and|qweight .* is of a scheme or layout"):
            load_weights(model, folder)
    return [torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]


def test_load_weights_refuses_groups_of_columns_without_a_scale(tmp_path: Path, two_ranks: RankPool) -> None:
    groups = torch.arange(256) // 64
    cases = {"beyond": groups + 1, "negative": groups - 1, "short": groups[:200], "matrix": groups.view(2, 128)}
    for case, wrong in cases.items():
        _with_groups(tmp_path / f"gptq, {case}", "gptq", wrong)
    _with_groups(tmp_path / "compressed", "compressed-tensors int4, zeros", groups + 1)
    assert two_ranks.run(_refusals_of_groups, str(tmp_path)) == [[True, True]] * 2


def test_load_weights_takes_columns_in_order_where_compressed_tensors_sets_no_groups(tmp_path: Path) -> None:
    """compressed-tensors fills ``weight_g_idx`` with -1 before activations order the columns."""
    values = _with_groups(tmp_path / "int4", "compressed-tensors int4, zeros", torch.full((256,), -1))
    model = _model()
    load_weights(model, tmp_path / "int4", strict=True)
    assert all(torch.equal(loaded, values[name]) for name, loaded in model.state_dict().items())


def _unpacked(words: Tensor) -> Tensor:
    return (words[:, None] >> torch.arange(8)[:, None] * 4 & 15).flatten(0, 1)


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


_STATE = f"{_NAMES[0]}.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("scheme", "damaged"),
    [
        ("gptq", "{not json"),
        ("gptq", '{"quantization_config": "gptq"}'),
        ("fp8 blocks", '{"quantization_config": {"weight_block_size": [128]}}'),
        ("fp8 blocks", '{"quantization_config": {"weight_block_size": [0, 0]}}'),
        ("bitsandbytes nf4", {_STATE: torch.tensor([123], dtype=torch.uint8)}),
        ("bitsandbytes nf4", {f"{_NAMES[0]}.absmax": None}),
        ("bitsandbytes nf4", {f"{_NAMES[0]}.absmax": torch.ones(7)}),
        ("bitsandbytes nf4", {_NAMES[0]: torch.zeros(9, 1, dtype=torch.uint8)}),
        ("bitsandbytes nf4, nested", {f"{_NAMES[0]}.nested_quant_map": torch.ones(3)}),
        ("bitsandbytes nf4, nested", {f"{_NAMES[0]}.nested_absmax": torch.ones(1)}),
        ("bitsandbytes int8", {"0.0.0.SCB": torch.ones(3)}),
        ("compressed-tensors int8, zeros", {f"{_NAMES[0]}_zero_point": torch.ones(3, 1, dtype=torch.int8)}),
        ("compressed-tensors int4", {f"{_NAMES[0]}_scale": torch.ones(192, 0)}),
        ("awq", {"0.0.0.scales": torch.ones(0, 192)}),
        ("torchao int4", {"0.0.0._weight_scale": torch.ones(0, 192)}),
    ],
)
def test_load_weights_refuses_damaged_scales_and_configs_first(scheme: str, damaged: Any, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    _checkpoint(folder, scheme)
    if isinstance(damaged, str):
        (folder / "config.json").write_text(damaged)
    else:
        tensors = {**load_file(folder / "model.safetensors"), **damaged}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")
    model = _model().to("meta")
    with pytest.raises(ConversionError, match="quantize the checkpoint again"):
        load_weights(model, folder)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(("scheme", "group"), [("awq", 64), ("fp8 blocks", 128), ("bitsandbytes nf4", 64)])
def test_load_weights_refuses_blocks_that_cross_stored_groups(scheme: str, group: int, tmp_path: Path) -> None:
    _checkpoint(tmp_path / scheme, scheme)
    kind: Any = _SCHEMES[scheme][2]
    model = parallelize(_model().to("meta"), MeshSpec().build(device_type="cpu"), steps=(Quantized(kind, 96),))
    with pytest.raises(
        ConversionError, match=f"{group} columns share a stored scale, .* blocks of 96: .* divides {group}"
    ):
        load_weights(model, tmp_path / scheme)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.0.0.weight_packed": torch.zeros(2)}, "0.0.0.weight_packed .* is of a scheme or layout that is not read"),
        ({"0.0.0._weight_qdata": torch.zeros(2, 2, dtype=torch.int32)}, "_weight_qdata .* I32 in .* not read"),
        (
            {name: each for name, each in _gptq("0.0.1.weight", (192, 256))[0].items() if "g_idx" not in name},
            r"qweight \(32, 192\) I32 in .* not read",
        ),
        (
            {
                **_compressed_int4("0.0.1.weight", (192, 256), symmetric=True)[0],
                "0.0.1.weight_scale": torch.ones(192, 3),
            },
            r"weight_packed \(192, 32\) I32 in .* not read",
        ),
        (
            {
                **_compressed_int4("0.0.1.weight", (192, 256), symmetric=True)[0],
                "0.0.1.weight_shape": torch.tensor([192]),
            },
            r"weight_packed \(192, 32\) I32 in .* not read",
        ),
        (_gptq("0.0.1.weight", (192, 256))[0], "checkpoint_format=None .* write 'gptq'"),
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
