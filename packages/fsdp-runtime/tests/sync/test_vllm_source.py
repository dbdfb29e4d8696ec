"""The weight source under both of vLLM's protocols, and the shards that it declares."""

from __future__ import annotations

import doctest
import importlib
import runpy
import sys
from functools import cached_property
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tp_plans
from fsdp_runtime import MeshSpec, OptionError, parallelize, stream_weights
from fsdp_runtime.sync import Quantization, WeightExport
from fsdp_runtime.sync.vllm_source import MeshPlacement, mesh_placement
from harness.models import tiny_model
from harness.ranks import RankPool

SMALL: dict[str, Any] = {"dtype": torch.float32, "intermediate_size": 96}


def source_class() -> Any:
    return importlib.import_module("fsdp_runtime.sync.vllm_source").WeightSource


def test_one_source_serves_both_protocols(release: str) -> None:
    model = tiny_model("Qwen3MoeForCausalLM", **SMALL)
    source = source_class()(model, export=WeightExport(dtype=torch.bfloat16))
    described = [(each.name, each.dtype, each.shape) for each in WeightExport(dtype=torch.bfloat16).describe(model)]
    if release == "0.32":
        declared, streamed = source.metadata(), list(source)
    else:
        assert isinstance(type(source).__dict__["metadata"], cached_property)
        declared, streamed = source.metadata, list(source.iter_full())
        assert source.implements_iter_full()
        assert source.implements_iter_local()
        assert source.owned_names(0) == [each.name for each in declared]
    assert [(meta.name, meta.dtype, meta.shape) for meta in declared] == described
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in streamed] == described
    assert [name for name, _ in source.iter_full()] == [name for name, _ in source.iter_full()]  # every pass is fresh


def test_beside_a_vllm_without_trainer_engines_it_is_as_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.24, which verl takes: the room opens all the same."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for name in ("distributed", "distributed.weight_transfer", "distributed.weight_transfer.base"):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", ModuleType(f"vllm.{name}"))
    found = runpy.run_path(source_class().__init__.__globals__["__file__"])
    assert found["WeightSource"].__bases__ == (object,)
    assert found["_base"] is None


def test_quantized_weights_have_no_shards() -> None:
    source = source_class()(
        tiny_model("LlamaForCausalLM", **SMALL), export=WeightExport(quantize=Quantization(format="fp8"))
    )
    assert not source.implements_iter_local()
    assert {str(meta.dtype) for meta in source.metadata} >= {"torch.float8_e4m3fn", "torch.bfloat16"}
    with pytest.raises(OptionError, match="iter_full"):
        list(source.iter_local())


def _pieces(architecture: str, sizes: dict[str, int]) -> tuple[list[str], int, int]:
    """Weights whose local part is not what its placements say of the full tensor; weights with shards; weights."""
    from fsdp_runtime.sync.vllm_source import WeightSource

    mesh = MeshSpec(**sizes).build(device_type="cpu")
    model = parallelize(tiny_model(architecture, **SMALL), mesh)
    source = WeightSource(model, export=WeightExport(dtype=torch.bfloat16))
    full = {name: tensor.clone() for name, tensor in stream_weights(model, dtype=torch.bfloat16)}
    local = list(source.iter_local())
    wrong = [] if [name for name, _ in local] == [meta.name for meta in source.metadata] else ["order"]
    for meta, (name, tensor) in zip(source.metadata, local, strict=True):
        if not torch.equal(_part(full[name], meta, dist.get_rank()), tensor):
            wrong.append(name)
    return wrong, sum(meta.placements is not None for meta in source.metadata), len(local)


def _part(full: Tensor, meta: Any, rank: int) -> Tensor:
    """What vLLM documents: one placement per axis of the row-major mesh; a shard is cut as ``torch.chunk`` does."""
    if meta.placements is None:
        return full
    place = torch.arange(len(meta.owners)).view(meta.mesh_shape).eq(meta.owners.index(rank)).nonzero()[0]
    for index, size, placement in zip(place.tolist(), meta.mesh_shape, meta.placements, strict=True):
        if hasattr(placement, "dim"):
            full = full.chunk(size, placement.dim)[index]
    return full


def test_local_parts_are_those_that_the_placements_declare(two_ranks: RankPool) -> None:
    for architecture, least in (("Qwen3ForCausalLM", 13), ("Qwen3MoeForCausalLM", 10)):
        for sizes in ({"tp": 2}, {"dp_shard": 2}):
            for wrong, sharded, count in two_ranks.run(_pieces, architecture, sizes):
                assert wrong == []
                assert least <= sharded <= count


def test_placements_of_two_axes_and_none_where_no_mesh_of_ranks_in_order_says_it() -> None:
    shard, replicate, strided = tp_plans.Shard, tp_plans.Replicate(), tp_plans.boxes.StridedShard
    tensors = {"weight": tp_plans.transfer.CheckpointTensor((8, 4))}

    def placed(shape: tuple[int, int], *layouts: Any) -> MeshPlacement | None:
        return mesh_placement(tp_plans.transfer.mesh_layout(tensors, shape, {"weight": layouts}), "weight", 4)

    assert placed((2, 2), shard(0), shard(1)) == MeshPlacement((2, 2), (0, 1))
    assert placed((2, 2), shard(0), replicate) == MeshPlacement((2, 2), (0, None))
    assert placed((2, 2), replicate, shard(1)) == MeshPlacement((2, 2), (None, 1))
    assert placed((2, 2), shard(0), shard(0)) in (MeshPlacement((4,), (0,)), MeshPlacement((2, 2), (0, 0)))
    assert placed((2, 2), strided(0), shard(0)) is None  # FSDP2 under TP: ranks out of order
    assert placed((2, 2), replicate, replicate) is None
    uneven = {"weight": tp_plans.transfer.CheckpointTensor((7, 4))}
    assert mesh_placement(tp_plans.transfer.mesh_layout(uneven, (4,), {"weight": [shard(0)]}), "weight", 4) is None


def _adapted_pieces() -> list[str]:
    from fsdp_runtime.sync import WeightSource

    model = peft.get_peft_model(
        tiny_model("Qwen3ForCausalLM", **SMALL),
        peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    parallelize(model, MeshSpec(dp_shard=2).build(device_type="cpu"))
    source, wrong = WeightSource(model), []
    for _ in range(2):
        full = dict(stream_weights(model))
        for meta, (name, tensor) in zip(source.metadata, source.iter_local(), strict=True):
            wrong += [name] * (not torch.equal(_part(full[name], meta, dist.get_rank()), tensor))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    return wrong


def test_local_parts_have_adapters_merged_with_their_present_values(two_ranks: RankPool) -> None:
    assert two_ranks.run(_adapted_pieces) == [[], []]


def test_a_source_sends_what_the_model_has_at_each_pass() -> None:
    model = peft.get_peft_model(
        tiny_model("LlamaForCausalLM", **SMALL),
        peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    )
    source = source_class()(model)
    for change in (
        lambda: model.load_state_dict({name: each + 1 for name, each in model.state_dict().items()}, assign=True),
        lambda: model.base_model.disable_adapter_layers(),
    ):
        change()
        assert {name: each.tolist() for name, each in source} == {
            name: each.tolist() for name, each in stream_weights(model)
        }


def test_parameters_that_moved_are_read_where_they_are() -> None:
    """``.to()`` keeps parameters and gives them other memory, as a move to another device and back does."""
    model = tiny_model("LlamaForCausalLM", **SMALL)
    source = source_class()(model)
    model.to(torch.float64).to(torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    expected = {name: each.tolist() for name, each in stream_weights(model)}
    for weights in (source.iter_local, source.iter_full):
        assert {name: each.tolist() for name, each in weights()} == expected


def test_weights_that_are_no_longer_as_declared_are_refused() -> None:
    model = tiny_model("LlamaForCausalLM", **SMALL)
    source = source_class()(model)
    model.to(torch.bfloat16)
    for weights in (source.iter_full, source.iter_local):
        with pytest.raises(OptionError, match=r"embed_tokens.weight .*float32.*bfloat16.*new WeightSource"):
            next(iter(weights()))


def test_example_prints_what_it_says() -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(source_class())
    results = doctest.DocTestRunner().run(example)
    assert (results.failed, results.attempted > 0) == (0, True)
