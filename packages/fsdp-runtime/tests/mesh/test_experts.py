"""The second view of a mesh: ``ep`` and ``efsdp`` over the ranks of ``dp_shard x cp x tp``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from fsdp_runtime import MeshError, MeshSpec, adopt_mesh, submesh
from harness.ranks import RankPool, RanksFailed

SIZES = st.integers(min_value=1, max_value=6)


@given(replicate=SIZES, shard=SIZES, cp=SIZES, tp=SIZES, ep=SIZES)
def test_a_size_is_accepted_exactly_if_it_divides_the_ranks_of_a_replica(
    replicate: int, shard: int, cp: int, tp: int, ep: int
) -> None:
    spec = MeshSpec(dp_replicate=replicate, dp_shard=-1, cp=cp, tp=tp, ep=ep)
    world = replicate * shard * cp * tp
    if (shard * cp * tp) % ep == 0:
        assert spec.resolve(world).ep == ep
    else:
        with pytest.raises(MeshError, match="does not divide the"):
            spec.resolve(world)


def test_a_size_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(MeshError, match=r"ep=3 does not divide the 4 ranks of dp_shard=2 x cp=1 x tp=2: .* 1, 2, 4"):
        MeshSpec(dp_shard=2, tp=2, ep=3).resolve(4)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True])
def test_a_size_that_is_no_positive_integer_is_refused(size: object) -> None:
    with pytest.raises(MeshError, match="axis ep has size"):
        MeshSpec(ep=size)  # type: ignore[arg-type]


def _axes(**sizes: int) -> dict[str, list[int]]:
    mesh = MeshSpec(**sizes).build(device_type="cpu")
    return {axis: submesh(mesh, axis).mesh.tolist() for axis in ("ep", "efsdp", "tp")}


def _all_axes() -> list[dict[str, list[int]]]:
    shapes = ({"dp_shard": 2, "tp": 2, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 4}, {"tp": 4, "ep": 2})
    return [_axes(**shape) for shape in (*shapes, {"dp_replicate": 2, "dp_shard": 2, "ep": 2})]


def test_ranks_of_ep_are_neighbours_and_equal_to_those_of_tp_where_the_sizes_are(four_ranks: RankPool) -> None:
    assert four_ranks.run(_all_axes)[3] == [
        {"ep": [2, 3], "efsdp": [1, 3], "tp": [2, 3]},
        {"ep": [0, 1, 2, 3], "efsdp": [3], "tp": [2, 3]},
        {"ep": [2, 3], "efsdp": [1, 3], "tp": [0, 1, 2, 3]},
        {"ep": [2, 3], "efsdp": [3], "tp": [3]},
    ]


def _adopted(shape: tuple[int, ...], names: tuple[str, ...], **theirs: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    view = init_device_mesh("cpu", shape, mesh_dim_names=names)
    adopted = adopt_mesh(mesh, dp_shard="fsdp", expert_mesh=view, **theirs)
    groups = submesh(adopted, "ep").get_group() is view[names[-1]].get_group()
    return submesh(adopted, "ep").mesh.tolist(), submesh(adopted, "efsdp").size(), groups


def _adoptions() -> list[Any]:
    return [
        _adopted((1, 2, 2), ("dp_replicate", "efsdp", "ep")),  # torchtitan's and transformers' names
        _adopted((4,), ("expert",), ep="expert"),
    ]


def test_another_programs_view_is_adopted_with_its_groups(four_ranks: RankPool) -> None:
    assert four_ranks.run(_adoptions)[2] == [([2, 3], 2, True), ([0, 1, 2, 3], 1, True)]


def _misnamed() -> None:
    _adopted((2, 2), ("efsdp", "experts"))


def _other_order() -> None:
    _adopted((2, 2), ("ep", "efsdp"))


@pytest.mark.parametrize("adopt", [_misnamed, _other_order])
def test_a_view_with_other_axes_is_refused(four_ranks: RankPool, adopt: Any) -> None:
    with pytest.raises(RanksFailed, match="MeshError: the expert mesh has axes"):
        four_ranks.run(adopt)


def _without_view() -> None:
    submesh(MeshSpec(tp=-1).build(device_type="cpu"), "ep")


def test_a_mesh_without_the_view_names_the_setting(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"has no axis 'ep': its axes are .*; build it with MeshSpec\(..., ep=N\)"):
        two_ranks.run(_without_view)
