"""Meshes: sizes inferred and checked, every axis present, flattened axes at hand."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from fsdp_runtime import (
    MeshError,
    MeshSpec,
    ModelError,
    OptionError,
    adopt_mesh,
    parallelize,
    sequence_layout,
    submesh,
)
from fsdp_runtime.mesh.spec import default_device_type
from harness.models import tiny_inputs, tiny_model
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


def test_an_axis_of_a_mesh_is_one_object() -> None:  # compiled code guards on it
    mesh = MeshSpec().build(device_type="cpu")
    assert all(submesh(mesh, axis) is submesh(mesh, axis) for axis in ("tp", "dp"))


def _unknown_axis() -> None:
    submesh(MeshSpec(tp=-1).build(device_type="cpu"), "expert")


def test_an_axis_that_the_mesh_lacks_is_named(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="MeshError: the mesh has no axis 'expert'"):
        two_ranks.run(_unknown_axis)


AXES = ("dp_replicate", "dp_shard", "cp", "tp")


def _adopted(names: tuple[str, ...], shape: tuple[int, ...], **theirs: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    adopted = adopt_mesh(mesh, **theirs)
    total = torch.ones(())
    dist.all_reduce(total, group=submesh(adopted, "dp_cp").get_group())
    return {
        "sizes": {axis: adopted[axis].size() for axis in AXES},
        "same groups": [adopted.get_group(axis) is mesh.get_group(name) for axis, name in theirs.items()],
        "ranks of dp_cp": int(total),
        "tp": submesh(adopted, "tp").mesh.tolist(),
    }


def test_a_mesh_of_other_names_is_adopted_with_its_groups(four_ranks: RankPool) -> None:
    found = four_ranks.run(_adopted, ("data", "model"), (2, 2), dp_shard="data", tp="model")[3]
    assert found == {
        "sizes": {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2},
        "same groups": [True, True],
        "ranks of dp_cp": 2,
        "tp": [2, 3],
    }


@pytest.mark.parametrize("axis", AXES)
def test_a_mesh_of_one_axis_gets_the_others_at_size_one(two_ranks: RankPool, axis: str) -> None:
    for found in two_ranks.run(_adopted, (axis,), (2,)):
        assert found["sizes"] == {**dict.fromkeys(AXES, 1), axis: 2}
        assert found["ranks of dp_cp"] == (1 if axis == "tp" else 2)


def _trained_on_an_adopted_mesh() -> float:
    mesh = adopt_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "model")), dp_shard="fsdp", tp="model")
    model = tiny_model("Qwen3ForCausalLM")
    inputs = tiny_inputs(model, batch=2, length=5)
    expected = model(**inputs, use_cache=False).logits
    logits = parallelize(model, mesh, logits="full")(**inputs, use_cache=False).logits
    logits.sum().backward()
    return (logits - expected).abs().max().item()


def test_a_model_trains_on_an_adopted_mesh(four_ranks: RankPool) -> None:
    assert max(four_ranks.run(_trained_on_an_adopted_mesh)) < 1e-5


def _adopt(names: tuple[str, ...], shape: tuple[int, ...], **theirs: str) -> None:
    adopt_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), **theirs)


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        (("fsdp",), (2,), r"and fsdp matches none of the arguments.*adopt_mesh\(mesh, tp='fsdp'\)"),
        (("tp", "dp_shard"), (1, 2), r"order tp, dp_shard; pass mesh\['dp_shard', 'tp'\]"),
    ],
)
def test_a_mesh_that_cannot_be_adopted_is_refused_with_the_fix(
    two_ranks: RankPool, names: tuple[str, ...], shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RanksFailed, match=message):
        two_ranks.run(_adopt, names, shape)


def _flattened_of_a_subset() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    return [submesh(mesh, axis).size() for axis in ("dp", "dp_shard_cp", "dp_cp")]


def test_flattened_axes_of_a_mesh_that_lacks_some(four_ranks: RankPool) -> None:
    assert four_ranks.run(_flattened_of_a_subset)[0] == [2, 2, 2]


@pytest.mark.parametrize("device_type", ["tpu", "", 3])
def test_devices_that_the_machine_lacks_are_refused(device_type: Any) -> None:
    MeshSpec().build(device_type="cpu")  # a running group
    with pytest.raises(MeshError, match=r"this machine has cpu|not str") if device_type else nullcontext():
        MeshSpec().build(device_type=device_type)


@pytest.mark.parametrize("value", [None, 3, "mesh", torch.zeros(2)], ids=["None", "int", "str", "tensor"])
def test_values_of_other_types_are_refused_with_their_type(value: Any) -> None:
    mesh, model = MeshSpec().build(device_type="cpu"), torch.nn.Linear(2, 2)
    name = rf"type {type(value).__name__}, not"
    with pytest.raises(ModelError, match=f"model is of {name} a torch.nn.Module"):
        parallelize(value, mesh)
    calls = (lambda: parallelize(model, value), lambda: submesh(value, "tp"), lambda: adopt_mesh(value))
    for call in (*calls, lambda: sequence_layout(value, 8)):
        with pytest.raises(MeshError, match=f"mesh is of {name} (a )?DeviceMesh"):
            call()
    if value is not None:
        with pytest.raises(OptionError, match=rf"fsdp=.* is of type {type(value).__name__}: give FSDP2"):
            parallelize(model, mesh, fsdp=value)
