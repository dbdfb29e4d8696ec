"""Shards in low precision: the bits of the quantized full weights, cut, for every sharding; sent, updated, hashed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tp_plans
from fsdp_runtime import OptionError, parallelize, stream_weights
from fsdp_runtime.sharded.boxes import local_part, slices_of
from fsdp_runtime.sharded.hashing import hash_bits
from fsdp_runtime.sync import (
    ModelShards,
    Quantization,
    WeightExport,
    WeightSync,
    digest,
    digest_layout,
    execute_transfer,
    quantized_shards,
    verify_transfer,
)
from fsdp_runtime.sync.execute import box_views
from fsdp_runtime.sync.quantized_shards import QuantizedShards
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from tp_plans import Replicate, Shard
from tp_plans.boxes import StridedShard, full_box
from tp_plans.transfer import CheckpointTensor, EngineSize, TransferLayout

FORMATS = ("fp8", "fp8_block", "mxfp8", "nvfp4")
MESHES = [(2,), (3,), (8,), (2, 2), (3, 2), (2, 2, 2)]
#: Rows and columns that cut blocks, groups and ranks unevenly; columns are whole groups.
SHAPES = [(5, 64), (130, 288), (300, 96), (256, 256), (129, 32)]


def _full(seed: int, shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-5, 4, (shape[0], 1), generator=generator).float()
    full = (torch.randn(shape, generator=generator) * 10**rows).to(torch.bfloat16)
    if seed % 3 == 0:  # a maximum of floats may lose it
        full[shape[0] // 2, shape[1] // 3] = float("nan")
    return full


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def _quantized(layout: TransferLayout, full: Tensor, quantization: Quantization) -> list[QuantizedShards]:
    """Every rank's shards of one weight; the maximum over ranks is taken here."""
    ranks, found = range(max(layout.ranks) + 1), []
    for rank in ranks:
        local = {}
        for name, shape in layout.local_shapes(rank).items():
            local[name] = torch.zeros(shape, dtype=torch.bfloat16)
            for part, view in box_views(layout, rank, local, "up_proj.weight", full_box(full.shape)):
                view.copy_(full[tuple(slice(*side) for side in part)])
        found.append(QuantizedShards(layout, local, quantization, rank, ()))
    reduce = quantized_shards.all_reduce_over
    numbers = torch.stack([each._magnitudes()[1] for each in found]).amax(0)
    try:
        quantized_shards.all_reduce_over = lambda *_: numbers  # type: ignore[assignment]
        for each in found:
            each.refresh()
    finally:
        quantized_shards.all_reduce_over = reduce
    return found


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(FORMATS), st.sampled_from(SHAPES), st.sampled_from(MESHES), st.integers(0, 99))
def test_every_block_has_the_bits_of_the_quantized_full_weight(
    data: Any, kind: Any, shape: tuple[int, int], mesh: tuple[int, ...], seed: int
) -> None:
    dims = st.integers(0, 1)
    axis = st.one_of(st.just(Replicate()), dims.map(Shard), dims.map(StridedShard))
    layouts = data.draw(st.tuples(*[axis] * len(mesh)))
    tensors = {"up_proj.weight": CheckpointTensor(shape)}
    layout = tp_plans.transfer.mesh_layout(tensors, mesh, {"up_proj.weight": layouts})
    quantization, full = Quantization(format=kind), _full(seed, shape)
    if kind == "nvfp4" and any(border % 2 for b in layout.blocks("up_proj.weight") for border in b.box[1]):
        with pytest.raises(OptionError, match="nvfp4 stores two columns in a byte"):
            _quantized(layout, full, quantization)
        return
    parts = quantization.parts("up_proj.weight", shape)
    expected = dict(zip((part.name for part in parts), quantization.quantize(full), strict=True))
    for rank, shards in enumerate(_quantized(layout, full, quantization)):
        for name, tensor in expected.items():
            for part, view in box_views(shards.layout, rank, shards.local, name, full_box(tensor.shape)):
                wanted = tensor[tuple(slice(*side) for side in part)]
                assert torch.equal(_bits(view), _bits(wanted)), (name, rank, part)


def _sent(architecture: str, axes: dict[str, int], formats: tuple[str, ...]) -> list[str]:
    """What a receiver of four ranks has otherwise than one process quantizes: after a full update and a delta."""
    wrong = []
    for kind in formats:
        quantization = Quantization(format=kind)
        plain = tiny_model(architecture, dtype=torch.float32, num_hidden_layers=1)
        model = parallelize(copy.deepcopy(plain), mesh_for(axes))
        shards = ModelShards(model, export=WeightExport(quantize=quantization))
        tensors = shards.layout.tensors
        target = tp_plans.transfer.engine_layout(tensors, EngineSize(num_attention_heads=4), replicas=4)
        local = {
            block.local: torch.zeros(shape, dtype=getattr(torch, tensors[name].dtype))
            for shapes in [target.local_shapes(torch.distributed.get_rank())]
            for name in tensors
            for block in target.blocks(name)[:1]
            for shape in [shapes[block.local]]
        }
        plan = tp_plans.transfer.plan_transfer(shards.layout, target)
        sync = WeightSync(plan, source=shards, destination=local)
        for version in range(2):
            report = sync.update(version)
            verify_transfer(plan, source=shards, destination=local)
            expected = {n: int(hash_bits(t)) for n, t in stream_weights(plain, quantize=quantization)}
            wrong += (
                [f"{kind}: digests of the trainer"]
                if digest(model, export=WeightExport(quantize=quantization)) != expected
                else []
            )
            wrong += [f"{kind}: digests of the engine"] if digest_layout(target, local) != expected else []
            with torch.no_grad():
                for name, parameter in plain.named_parameters():
                    parameter[..., ::7] *= 1.5 if "proj" in name else 1
                full = dict(plain.named_parameters())
                for name, parameter in model.named_parameters():
                    part, box = local_part(parameter)
                    part.copy_(full[name][slices_of(box)])
        wrong += [f"{kind}: {report}"] if report.full_ranks or report.bytes_sent >= report.bytes_full else []
    return wrong


@pytest.mark.parametrize(
    ("architecture", "axes", "formats"),
    [
        ("Qwen3MoeForCausalLM", {"dp_shard": 2, "tp": 2, "ep": 2}, FORMATS[1::2]),
        pytest.param("Qwen3ForCausalLM", {"dp_shard": 2, "tp": 2}, FORMATS, marks=pytest.mark.slow),
        pytest.param("Qwen3MoeForCausalLM", {"dp_shard": 2, "tp": 2, "ep": 2}, FORMATS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_engine_gets_quantized_weights_and_differences_bit_for_bit(
    four_ranks: RankPool, architecture: str, axes: dict[str, int], formats: tuple[str, ...]
) -> None:
    assert four_ranks.run(_sent, architecture, axes, formats) == [[]] * 4


def test_quantized_shards_refuse_values_before_the_first_refresh() -> None:
    model = nn.Linear(32, 4, bias=False)
    shards = ModelShards(model, export=WeightExport(quantize=Quantization(format="fp8")))
    with pytest.raises(OptionError, match=r"call refresh\(\) on every rank of the model"):
        shards.local.clear()
    shards.refresh()
    first = shards.local["weight_scale#0"].clone()
    with torch.no_grad():
        model.weight.mul_(2)
    assert shards.local["weight_scale#0"] == first
    target = {name: torch.empty_like(tensor) for name, tensor in shards.local.items()}
    execute_transfer(tp_plans.transfer.plan_transfer(shards.layout, shards.layout), source=shards, destination=target)
    assert target["weight_scale#0"] == 2 * first
