"""Fused, merged and split checkpoints: every rank reads only its slices, and the stream equals the stored tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from coverage.table import entries, tiny_model
from fsdp_runtime._transformers_compat.conversions import Conversion
from fsdp_runtime.errors import ConversionError, MismatchError
from fsdp_runtime.sharded.boxes import slices_of
from fsdp_runtime.weights import load_weights, save_weights, stream_weights
from fsdp_runtime.weights.conversion import TensorSpec, trace_conversion, traced_input
from harness.memory import LiveBytes
from harness.parity import mesh_for, own_part
from harness.ranks import RankPool

#: Experts merged; experts merged beside fused shared ones; one fused tensor cut in two; rows interleaved.  The oldest
#: supported transformers has no plan for the last two.
MODELS = [name for name in ("mixtral", "qwen3_moe", "deepseek_v3", "granitemoe", "inkling2_text") if name in entries()]
#: How parameters of several experts are cut over ``tp``, other than their layers.
EXPERTS: dict[str, Placement] = {"experts": Shard(0), "rows": Shard(1), "columns": Shard(2)}
MESHES = ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2})


def _model(name: str, seed: int = 0) -> nn.Module:
    return tiny_model(entries()[name], dtype=torch.float32, seed=seed)


def _saved(name: str, path: Path) -> dict[str, Tensor]:
    _model(name).save_pretrained(path)
    return load_file(path / "model.safetensors")


def _distribute(model: nn.Module, mesh: DeviceMesh, experts: Placement) -> nn.Module:
    """Shard a model by hand: experts as given, matrices by rows, others replicated; then FSDP2."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = {3: experts, 2: Shard(0)}.get(parameter.ndim, Replicate())
            if mesh["tp"].size() > 1:
                cut = distribute_tensor(parameter.detach(), mesh["tp"], [placement])
                module.register_parameter(name, nn.Parameter(cut))
    if mesh["dp_shard"].size() > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
    return model


def _loaded(name: str, axes: dict[str, int], experts: str, path: Path) -> dict[str, Any]:
    model = _distribute(_model(name, seed=1), mesh_for(axes), EXPERTS[experts])
    report = load_weights(model, path)
    wanted = {**dict(_model(name).named_parameters())}
    stored = model.state_dict()
    wrong, held = [], sum(buffer.nbytes for key, buffer in model.named_buffers() if key in stored)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            expected = own_part(wanted[key], parameter) if isinstance(parameter, DTensor) else wanted[key]
            held += local.nbytes
            if local.numel() + expected.numel() and not torch.equal(local, expected):
                wrong.append(key)
    expected_stream = load_file(path / "model.safetensors")
    for bucket_bytes in (1, 10**9) if experts == "experts" else (10**9,):
        left = dict(expected_stream)
        for key, tensor in stream_weights(model, bucket_bytes=bucket_bytes):
            if not tensor.is_contiguous() or not torch.equal(tensor, left.pop(key)):
                wrong.append(f"streamed {key}")
        wrong += left
    return {"wrong": wrong, "read": report.bytes_read, "held": held, "unexpected": report.unexpected}


#: Every mesh and placement of experts; the slow session takes the other combinations.
DEFAULT = [
    ("inkling2_text", {"dp_shard": 2, "tp": 2}, "columns"),
    ("qwen3_moe", {"dp_shard": 2, "tp": 2}, "experts"),
    ("mixtral", {"dp_shard": 2, "tp": 2}, "rows"),
    ("granitemoe", {"tp": 2}, "columns"),
    ("granitemoe", {"dp_shard": 2}, "experts"),
]
CASES = [
    pytest.param(name, axes, experts, marks=[] if (name, axes, experts) in DEFAULT else [pytest.mark.slow])
    for name in MODELS
    for axes in MESHES
    for experts in (EXPERTS if "tp" in axes else ("experts",))
]


@pytest.mark.parametrize(("name", "axes", "experts"), CASES, ids=str)
def test_every_rank_reads_its_shards_of_converted_tensors_and_streams_them_as_stored(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, name: str, axes: dict[str, int], experts: str
) -> None:
    _saved(name, tmp_path)
    pool = four_ranks if len(axes) > 1 else two_ranks
    results = pool.run(_loaded, name, axes, experts, tmp_path)
    for result in results:
        assert result["wrong"] == []
        assert result["unexpected"] == ()
        if name != "inkling2_text":  # every rank reads the inputs of its conversion
            assert result["read"] == result["held"]


def _save(name: str, source: Path, target: Path) -> None:
    model = _distribute(_model(name, seed=1), mesh_for({"dp_shard": 2}), Shard(0))
    load_weights(model, source)
    save_weights(model, target, max_shard_size=50_000)


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_is_saved_as_transformers_saves_it(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    expected = _saved(name, tmp_path / "theirs")
    two_ranks.run(_save, name, tmp_path / "theirs", tmp_path / "ours")
    found = {k: v for file in (tmp_path / "ours").glob("*.safetensors") for k, v in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    reloaded = getattr(transformers, entries()[name].class_name).from_pretrained(tmp_path / "ours")
    wanted = _model(name).state_dict()
    assert [key for key, tensor in reloaded.state_dict().items() if not torch.equal(tensor, wanted[key])] == []


def _peak(path: Path) -> tuple[int, int]:
    """Peak live bytes while a rank loads, and those of its largest shard."""
    model = _distribute(_model("mixtral", seed=1), mesh_for({"tp": 2}), Shard(1))
    with LiveBytes() as live:
        load_weights(model, path)
    return live.peak, max(parameter.to_local().nbytes for parameter in model.parameters())


def test_loading_merged_experts_holds_one_stored_tensor_at_a_time(two_ranks: RankPool, tmp_path: Path) -> None:
    stored_sizes = [tensor.nbytes for tensor in _saved("mixtral", tmp_path).values()]
    smallest = min(stored_sizes)  # what a load also makes, such as a status byte a rank, is less than any tensor
    for peak, _ in two_ranks.run(_peak, tmp_path):
        assert 0 < peak < max(stored_sizes) + smallest


def test_fused_checkpoints_load_and_are_streamed_under_fused_names(tmp_path: Path) -> None:
    reference, model = _model("qwen3_moe"), _model("qwen3_moe", seed=1)
    reference.save_pretrained(tmp_path, save_original_format=False)
    load_weights(model, tmp_path)
    names = {name for name, _ in stream_weights(model)}
    assert names == load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    wanted = reference.state_dict()
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, wanted[name])] == []


def _without(names: str) -> Callable[[dict[str, Tensor]], None]:
    def remove(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if names in name]:
            del tensors[name]

    return remove


def _narrow(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], None], type[Exception], str]] = {
    "one expert's gate": (_without("layers.1.mlp.experts.2.gate_proj"), ConversionError, "cannot be converted"),
    "one whole expert": (_without("layers.1.mlp.experts.2."), MismatchError, r"experts\.gate_up_proj \(stored as"),
    "all experts": (_without("layers.1.mlp.experts."), MismatchError, r"experts\.down_proj: missing"),
    "a shape": (_narrow, ConversionError, "cannot be converted"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_experts_that_are_missing_or_misshapen_are_named_before_anything_changes(tmp_path: Path, fault: str) -> None:
    damage, error, told = BROKEN[fault]
    tensors = _saved("qwen3_moe", tmp_path)
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = _model("qwen3_moe", seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=told):
        load_weights(model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# Operations as reading plans.


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cat": lambda a, b: torch.cat([a, b], dim=-1),
    "stack": lambda a, b: torch.stack([a, b], dim=1),
    "stack and cat": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
    "chunk": lambda a, b: torch.chunk(torch.cat([a, b]), 4)[2],
    "split": lambda a, b: torch.cat([a, b], dim=1).split([3, 5], dim=1)[1],
    "transpose": lambda a, b: torch.cat([a.T, b.transpose(0, 1)]).contiguous(),
    "unbind": lambda a, b: torch.stack([a, b]).permute(2, 0, 1).unbind(1)[1],
    "squeeze": lambda a, b: torch.cat([a.unsqueeze(0), b[None]]).chunk(2)[1].squeeze(0),
    "squeeze of all dims": lambda a, b: torch.stack([a, b])[:1].squeeze(),
    "narrow": lambda a, b: torch.cat([a, b]).narrow(0, 2, 5)[1:-1, 1:],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_chunks_equals_the_operation_on_values(name: str) -> None:
    operation = OPERATIONS[name]
    values = {"a": torch.arange(24.0).view(6, 4), "b": torch.arange(24.0, 48.0).view(6, 4)}
    expected = operation(values["a"], values["b"])
    plan = operation(*(traced_input(key, value.shape, value.dtype) for key, value in values.items()))
    assert plan.shape == expected.shape
    found = torch.full_like(expected, -1)
    for chunk in plan.chunks:
        found[slices_of(chunk.target)] = chunk.to_target(values[chunk.source][slices_of(chunk.source_box)])
    assert torch.equal(found, expected)


def test_an_operation_that_interleaves_elements_has_no_chunks() -> None:
    def run(tensors: Any) -> dict[str, Tensor]:
        return {"out": tensors["a"].reshape(3, 2, 4).transpose(0, 1).reshape(6, 4)}

    (result,) = trace_conversion(Conversion(("a",), run), {"a": TensorSpec((6, 4), torch.float32)}).values()
    assert result.chunks is None
    assert result.shape == (6, 4)
