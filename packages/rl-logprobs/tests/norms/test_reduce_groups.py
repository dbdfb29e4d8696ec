"""Over which ranks a norm is summed: one collective for a mesh, whatever part of the world it is."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from harness.ranks import RankPool
from rl_logprobs import grad_norm
from rl_logprobs._torch_compat import joint_group


def group_of_a_few():
    mesh = DeviceMesh("cpu", [0, 1, 2])
    if dist.get_rank() == 3:
        return None
    first, second = joint_group(mesh), joint_group(mesh)
    total = torch.ones(())
    dist.all_reduce(total, group=first)
    return first is second, dist.get_process_group_ranks(first), total.item()


def test_the_ranks_of_a_mesh_make_their_group_once_and_without_the_others():
    fresh = RankPool(4)  # in a world that has served other tests some ranks may belong to more groups than others
    try:
        assert fresh.run(group_of_a_few) == [*[(True, [0, 1, 2], 3.0)] * 3, None]
    finally:
        fresh.close()


def test_stages_for_norms_of_no_parameters_end_with_their_group(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = weakref.ref(dist.new_group([0]))
    of_stages = (group, False, torch.device("cpu"), torch.float64)  # as fsdp_runtime sets it
    monkeypatch.setattr(dist.group, "_pipeline_stages", of_stages, raising=False)
    assert grad_norm([]).dtype is torch.float64
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
    assert grad_norm([]).dtype is torch.float32


def group_of_ranks_in_differently_many_groups():
    own = dist.new_group([0, 1])  # two ranks now belong to one group more than the others
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    parameter = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Shard(1)])
    parameter.grad = torch.ones_like(parameter)
    found = joint_group(mesh), grad_norm([parameter]).item()
    if dist.get_rank() < 2:
        dist.destroy_process_group(own)
    return found


def test_joint_group_is_left_out_where_ranks_are_in_different_numbers_of_groups(four_ranks):
    assert four_ranks.run(group_of_ranks_in_differently_many_groups) == [(None, pytest.approx(24**0.5))] * 4


def part_of_a_larger_world():
    """In a world of eight ranks that only one process stands for: the collectives can be counted, not summed."""
    dist.init_process_group("fake", rank=0, world_size=8, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
    layouts = [("dp_shard", "tp"), [Shard(0), Shard(1)]], ["dp_shard", [Shard(0)]], ["tp", [Replicate()]]
    parameters = [DTensor.from_local(torch.ones(2, 3), mesh[name], placements) for name, placements in layouts]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    grad_norm(parameters)  # the first call for a mesh also asks its ranks, once, whether they can form a group
    counts = []
    for groups in ([], [mesh.get_group("pp")]):
        with CommDebugMode() as counter:
            grad_norm(parameters, groups=groups)
        counts.append(counter.get_total_counts())
    return counts


def test_a_mesh_of_several_axes_takes_one_collective_also_in_a_larger_world():
    try:
        assert part_of_a_larger_world() == [1, 1]
    finally:
        dist.destroy_process_group()
