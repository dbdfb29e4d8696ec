"""Meshes: sizes inferred and checked, every axis present, flattened axes at hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_runtime import MeshError, MeshSpec, submesh
from fsdp_runtime.mesh import default_device_type
from harness.ranks import RankPool, RanksFailed

SIZES = st.integers(min_value=1, max_value=8)


@given(replicate=SIZES, shard=SIZES, cp=SIZES, tp=SIZES)
def test_one_unknown_size_is_inferred_from_the_world(replicate: int, shard: int, cp: int, tp: int) -> None:
    spec = MeshSpec(dp_replicate=replicate, dp_shard=-1, cp=cp, tp=tp)
    assert spec.resolve(replicate * shard * cp * tp).sizes == {
        "dp_replicate": replicate,
        "dp_shard": shard,
        "cp": cp,
        "tp": tp,
    }


def test_a_world_that_the_sizes_do_not_fill_is_refused_with_the_numbers() -> None:
    with pytest.raises(MeshError, match=r"dp_shard=2 x tp=2 does not fill the world of 6 ranks.*start 4 ranks"):
        MeshSpec(dp_shard=2, tp=2).resolve(6)


def test_an_unknown_size_that_would_be_a_fraction_is_refused() -> None:
    with pytest.raises(MeshError, match="the other sizes must divide 6, and 4 does not"):
        MeshSpec(dp_shard=-1, tp=4).resolve(6)


def test_two_unknown_sizes_are_refused() -> None:
    with pytest.raises(MeshError, match="dp_shard and tp are both -1"):
        MeshSpec(dp_shard=-1, tp=-1)


@pytest.mark.parametrize("size", [0, -2, 1.0, "2", True])
def test_a_size_that_is_no_positive_integer_is_refused(size: object) -> None:
    with pytest.raises(MeshError, match="axis tp has size"):
        MeshSpec(tp=size)  # type: ignore[arg-type]


def _axes() -> dict[str, list[int]]:
    mesh = MeshSpec(dp_replicate=2, tp=2).build(device_type="cpu")
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "dp", "dp_shard_cp", "dp_cp")
    return {axis: submesh(mesh, axis).mesh.tolist() for axis in axes}


def test_every_axis_is_present_and_tp_ranks_are_neighbours(four_ranks: RankPool) -> None:
    axes = four_ranks.run(_axes)[3]
    assert axes == {
        "dp_replicate": [1, 3],
        "dp_shard": [3],
        "cp": [3],
        "tp": [2, 3],
        "dp": [1, 3],
        "dp_shard_cp": [3],
        "dp_cp": [1, 3],
    }


def test_a_build_for_an_accelerator_that_is_not_there_uses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def cuda_build_without_gpu(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", cuda_build_without_gpu)
    assert default_device_type() == "cpu"


def _build_too_small() -> None:
    MeshSpec(tp=2).build(device_type="cpu")


def test_every_rank_learns_that_the_mesh_does_not_fill_the_world(four_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        four_ranks.run(_build_too_small)
    assert {error.type_name for error in caught.value.errors.values()} == {"MeshError"}
    assert len(caught.value.errors) == 4


def _unknown_axis() -> None:
    submesh(MeshSpec(tp=-1).build(device_type="cpu"), "expert")


def test_an_axis_that_the_mesh_lacks_is_named(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="MeshError: the mesh has no axis 'expert'"):
        two_ranks.run(_unknown_axis)
