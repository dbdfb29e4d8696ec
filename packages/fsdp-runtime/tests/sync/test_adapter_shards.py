"""The factors of an adapter alone, from shards to a receiver, under peft's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import tp_plans
from fsdp_runtime import OptionError, parallelize, save_adapter, stream_weights
from fsdp_runtime.sharded.hashing import hash_bits
from fsdp_runtime.sync import ModelShards, Quantization, WeightExport, WeightSync, digest, digest_layout
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from tp_plans import Replicate, Shard
from tp_plans.transfer import EngineSize


def _adapted() -> Any:
    model = tiny_model("Qwen3ForCausalLM", dtype=torch.float32)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj", "up_proj"])
    wrapped: Any = peft.get_peft_model(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return wrapped


def _received(path: Path) -> list[str]:
    """Factors that differ from the saved adapter on a rank that stores all of them, after a full update and a delta."""
    model = parallelize(_adapted(), mesh_for({"dp_shard": 2, "tp": 2}))
    shards = ModelShards(model, adapter="default")
    tensors = shards.layout.tensors
    target = tp_plans.transfer.mesh_layout(tensors, (4,), {name: [Replicate()] for name in tensors})
    local = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    plan = tp_plans.transfer.plan_transfer(shards.layout, target)
    sync = WeightSync(plan, source=shards.local, destination=local)
    sync.update(0)
    with torch.no_grad():
        for tensor in shards.local.values():
            tensor.mul_(2)
    sync.update(1)
    save_adapter(model, path)
    dist.barrier()
    saved = load_file(path / "adapter_model.safetensors")
    wrong = sorted(saved.keys() ^ local.keys())
    wrong += [name for name in saved.keys() & local.keys() if not torch.equal(saved[name], local[name])]
    if digest_layout(shards.layout, shards.local) != digest_layout(target, local):
        wrong.append("digests")
    return wrong


def test_an_adapter_reaches_a_receiver_alone_and_bit_for_bit(four_ranks: RankPool, tmp_path: Path) -> None:
    assert four_ranks.run(_received, tmp_path) == [[]] * 4


@pytest.mark.parametrize("options", [{"use_dora": True}, {"bias": "lora_only"}, {"modules_to_save": ["norm"]}], ids=str)
def test_an_adapter_has_all_that_peft_saves_of_it(options: dict[str, Any]) -> None:
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], **options)
    model: Any = peft.get_peft_model(tiny_model("Qwen2ForCausalLM", dtype=torch.float32), config)
    wanted = peft.get_peft_model_state_dict(model)
    found = ModelShards(model, adapter="default").local
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def _merged(formats: tuple[str | None, ...]) -> list[str]:
    """Weights that differ from what one process merges from full weights, in formats or, of None, in two dtypes."""
    wrong = []
    for kind in formats:
        quantize = None if kind is None else Quantization(format=kind)  # type: ignore[arg-type]
        for dtype in (torch.float32, torch.bfloat16) if quantize is None else (None,):
            expected = dict(stream_weights(_adapted(), dtype=dtype, quantize=quantize))
            model = parallelize(_adapted(), mesh_for({"dp_shard": 2, "tp": 2}))
            shards = ModelShards(model, export=WeightExport(dtype=dtype, quantize=quantize))
            tensors = shards.layout.tensors
            target = tp_plans.transfer.mesh_layout(tensors, (4,), {name: [Replicate()] for name in tensors})
            local = {name: torch.empty_like(expected[name]) for name in tensors}
            plan = tp_plans.transfer.plan_transfer(shards.layout, target)
            WeightSync(plan, source=shards, destination=local).update(0)
            wrong += [f"{dtype} {quantize}: names"] if local.keys() != expected.keys() else []
            wrong += [f"{dtype} {quantize}: {name}" for name in local if not _same(local[name], expected[name])]
            hashes = {name: int(hash_bits(tensor)) for name, tensor in expected.items()}
            wrong += ["digests"] if digest(model, export=WeightExport(dtype=dtype, quantize=quantize)) != hashes else []
    return wrong


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


@pytest.mark.parametrize("formats", [(None,), pytest.param(("nvfp4", "fp8_block"), marks=pytest.mark.slow)], ids=str)
def test_merged_adapters_have_the_bits_that_one_process_merges(
    four_ranks: RankPool, formats: tuple[str | None, ...]
) -> None:
    assert four_ranks.run(_merged, formats) == [[]] * 4


def test_merged_weights_are_those_of_peft_to_the_rounding_of_float32() -> None:
    streamed = dict(stream_weights(_adapted()))
    for name, tensor in _adapted().merge_and_unload().state_dict().items():
        torch.testing.assert_close(streamed[name], tensor, rtol=1e-5, atol=1e-6)


def _mixture() -> Any:
    model = tiny_model("Qwen3MoeForCausalLM", dtype=torch.float32)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    wrapped: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names))
    torch.manual_seed(6)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return wrapped


def test_adapters_of_experts_are_sent_alone_and_merged() -> None:
    model = _mixture()
    shards = ModelShards(model, adapter="default")
    expected = peft.get_peft_model_state_dict(model)
    assert shards.local.keys() == expected.keys()
    assert sum(".experts." in name for name in expected) == 8  # two layers, two parameters, two factors
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    plan = tp_plans.transfer.plan_transfer(shards.layout, shards.layout)
    sync = WeightSync(plan, source=shards, destination=target)
    sync.update(0)
    assert all(torch.equal(target[name], tensor) for name, tensor in expected.items())
    expected = dict(stream_weights(model))
    shards = ModelShards(model)
    everything = tp_plans.transfer.mesh_layout(shards.layout.tensors, (1,), {name: [Replicate()] for name in expected})
    merged = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    plan = tp_plans.transfer.plan_transfer(shards.layout, everything)
    WeightSync(plan, source=shards, destination=merged).update(0)
    assert all(_same(merged[name], tensor) for name, tensor in expected.items())


_MESHES: list[tuple[dict[str, int], dict[str, int]]] = [
    ({"dp_shard": 4, "ep": 2}, {"tp": 2}),  # experts over ep and efsdp
    ({"dp_shard": 2, "tp": 2}, {"tp": 4, "ep": 4}),
]


def _experts_received(meshes: list[tuple[dict[str, int], dict[str, int]]]) -> list[str]:
    """What receivers of sharded experts hold otherwise than one process: factors alone, and merged weights."""
    wrong, rank = [], dist.get_rank()
    for axes, size in meshes:
        case, plain = f"{axes} {size}", _mixture()
        model = parallelize(_mixture(), mesh_for(axes))
        shards = ModelShards(model, adapter="default")
        tensors = shards.layout.tensors
        cut: Any = {name: [Replicate(), Shard(len(tensor.shape) - 1)] for name, tensor in tensors.items()}
        apart = tp_plans.transfer.mesh_layout(tensors, (2, 2), cut)
        engine = EngineSize(num_attention_heads=4, num_key_value_heads=4, **size)
        merged = ModelShards(model, export=WeightExport(dtype=torch.bfloat16))
        together = tp_plans.transfer.engine_layout(merged.layout.tensors, engine, replicas=4 // engine.tp)
        for kind, source, target in (("factors", shards, apart), ("merged", merged, together)):
            dtype = torch.float32 if kind == "factors" else torch.bfloat16
            local = {key: torch.zeros(shape, dtype=dtype) for key, shape in target.local_shapes(rank).items()}
            sync = WeightSync(tp_plans.transfer.plan_transfer(source.layout, target), source=source, destination=local)
            for version in range(2):
                sync.update(version)
                expected = _adapter_of(plain) if kind == "factors" else dict(stream_weights(plain, dtype=dtype))
                hashes = {name: int(hash_bits(tensor)) for name, tensor in expected.items()}
                wrong += [f"{case}: {kind} {version}"] if digest_layout(target, local) != hashes else []
                for each in (plain, model):
                    _scale(each, 1.5)
    return wrong


def _adapter_of(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in peft.get_peft_model_state_dict(model).items()}


@torch.no_grad()
def _scale(model: Any, factor: float) -> None:
    """Multiply some factors of adapters, wherever their shards are."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(factor)


@pytest.mark.parametrize("meshes", [_MESHES[:1], pytest.param(_MESHES[1:], marks=pytest.mark.slow)], ids=str)
def test_adapters_of_sharded_experts_reach_receivers_bit_for_bit_alone_and_merged(
    four_ranks: RankPool, meshes: list[tuple[dict[str, int], dict[str, int]]]
) -> None:
    assert four_ranks.run(_experts_received, meshes) == [[]] * 4


def test_an_unknown_adapter_is_refused() -> None:
    with pytest.raises(OptionError, match="has no adapter 'other'"):
        ModelShards(_adapted(), adapter="other")


def test_adapters_that_were_merged_or_given_up_since_are_refused() -> None:
    model = _adapted()
    shards = ModelShards(model)
    model.merge_adapter()
    with pytest.raises(OptionError, match="the adapters have changed"):  # they would be added twice
        shards.refresh()
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["norm"])
    copies: Any = peft.get_peft_model(tiny_model("Qwen3ForCausalLM", dtype=torch.float32), config)
    shards = ModelShards(copies)
    copies.get_base_model().model.norm.enable_adapters(False)  # the base model's norm runs
    with pytest.raises(OptionError, match="the adapters have changed"):
        shards.refresh()


def test_shards_of_replaced_tensors_and_other_adapters_are_refused() -> None:
    model = _adapted()
    merged, alone = ModelShards(model), ModelShards(model, adapter="default")
    with model.disable_adapter(), pytest.raises(OptionError, match="the adapters have changed"):
        merged.refresh()
    merged.refresh()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)  # in place
    merged.refresh()
    assert alone.local
    model.load_state_dict(state, assign=True)
    with pytest.raises(OptionError, match="tensors were replaced"):
        merged.refresh()
    with pytest.raises(OptionError, match="make a new ModelShards"):
        alone.local  # noqa: B018  # a property
