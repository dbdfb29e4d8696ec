"""Shard offsets equal the local tensors of DTensor and FSDP2, for every placement, uneven and empty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_runtime import WeightsError, save_training_state, save_weights, stream_weights
from fsdp_runtime.sharded.boxes import dtensor_box, local_box, slices_of
from harness.parity import mesh_for
from harness.processes import preloaded_context
from harness.ranks import RankPool

SIZES = (1, 2, 3, 5, 8, 9, 131)


def _full(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(*shape)


def _agrees(shape: tuple[int, ...], placements: Sequence[Placement]) -> bool:
    full = _full(*shape)
    mesh = mesh_for({"dp_shard": 2, "tp": 2})["dp_shard", "tp"]
    tensor = distribute_tensor(full, mesh, placements)
    return torch.equal(full[slices_of(dtensor_box(tensor))], tensor.to_local())


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Replicate()),
        (Replicate(), Shard(0)),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(0), Shard(0)),
        (Replicate(), Replicate()),
    ],
    ids=str,
)
def test_slices_equal_dtensors_local_tensors(four_ranks: RankPool, placements: tuple[Placement, ...]) -> None:
    for size in SIZES:
        assert four_ranks.run(_agrees, (size, 3), placements) == [True] * 4


def _agrees_after_fsdp(size: int, tp_dim: int) -> bool:
    mesh = mesh_for({"dp_shard": 2, "tp": 2})
    module = nn.Module()
    full = _full(size, 3).float()
    module.weight = nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(tp_dim)]))
    fully_shard(module, mesh=mesh["dp_shard"])
    with torch.no_grad():
        held = torch.equal(full[slices_of(dtensor_box(module.weight))], module.weight.to_local())
        return held and torch.equal(module.weight.full_tensor(), full)


@pytest.mark.parametrize("tp_dim", [0, 1])
def test_slices_equal_local_tensors_of_fsdp_over_tp(four_ranks: RankPool, tp_dim: int) -> None:
    for size in SIZES:
        assert four_ranks.run(_agrees_after_fsdp, size, tp_dim) == [True] * 4


def _uneven_shard(rank: int) -> tuple[list[float], list[float]]:
    """Seven rows over dp_shard=3, tp=2 on one rank of a pretended world: what is held, and what is due."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp_shard", "tp"))
    module = nn.Module()
    full = torch.arange(7.0)
    module.weight = nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(module, mesh=mesh["dp_shard"])
    with torch.no_grad():
        return module.weight.to_local().tolist(), full[slices_of(dtensor_box(module.weight))].tolist()


def test_slices_of_uneven_shards_over_tp_equal_fsdps() -> None:
    """DTensor's own arithmetic gives the last row to rank (2, 0), and FSDP2 leaves it on rank (2, 1)."""
    with preloaded_context().Pool(2, maxtasksperchild=1) as processes:
        assert processes.map(_uneven_shard, [4, 5], chunksize=1) == [([], []), ([6.0], [6.0])]


@given(
    size=st.integers(0, 40),
    mesh=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    placements=st.sampled_from([(Shard(0), Shard(0)), (Shard(0), Replicate()), (Replicate(), Shard(0))]),
)
def test_slices_of_all_ranks_cover_every_element_once_per_replica(
    size: int, mesh: tuple[int, int], placements: tuple[Placement, ...]
) -> None:
    count = torch.zeros(size)
    for coordinate in ((i, j) for i in range(mesh[0]) for j in range(mesh[1])):
        count[slices_of(local_box((size,), placements, mesh, coordinate))] += 1
    replicas = math.prod(n for n, placement in zip(mesh, placements, strict=True) if placement.is_replicate())
    assert (count == replicas).all()


def _refusal_of_a_partial() -> str:
    mesh = mesh_for({"tp": 2})["tp"]
    with pytest.raises(WeightsError) as refusal:
        dtensor_box(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    return str(refusal.value)


def _refusals_of_a_model_with_a_partial(directory: str) -> list[str]:
    """What saving, loading and streaming say of a parameter without a place of its own on each rank."""
    mesh = mesh_for({"tp": 2})["tp"]
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0].weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    calls = (
        lambda: list(stream_weights(model)),
        lambda: save_weights(model, directory),
        lambda: save_training_state(directory, model, step=1),
    )
    refusals = []
    for call in calls:
        with pytest.raises(WeightsError) as refusal:
            call()
        refusals.append(str(refusal.value))
    return refusals


def test_a_parameter_without_a_place_is_named(two_ranks: RankPool, tmp_path: Path) -> None:
    for refusals in two_ranks.run(_refusals_of_a_model_with_a_partial, str(tmp_path)):
        assert [refusal[:10] for refusal in refusals[:2]] == ["0.weight: "] * 2
        assert refusals[2].startswith("model/0.weight: ")


def test_a_partial_sum_is_refused(two_ranks: RankPool) -> None:
    assert all("only Shard and Replicate" in message for message in two_ranks.run(_refusal_of_a_partial))
