"""Meshes over parts of a world: nothing waits for ranks of another mesh.

In processes of their own: the pools of ranks share process groups, and would hide who takes part in making one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_runtime._torch_compat import local_group
from harness.launched import launch
from harness.ranks import RankPool


@pytest.mark.parametrize(("axes", "second"), [("shards", "two"), ("replicas", "one"), ("cp", "two")])
def test_two_meshes_of_one_world_are_adopted_and_trained_on(axes: str, second: str, tmp_path: Path) -> None:
    script = Path(__file__).parent / "two_meshes.py"
    done = launch(script, axes, second, str(tmp_path), ranks=6, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all((tmp_path / f"rank {rank}").exists() for rank in range(6))


def _group_in_a_bound_world() -> list[float]:
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda:0")  # as init_process_group(device_id=...) does
    try:
        group = local_group([dist.get_rank()])
        assert world.bound_device_id == torch.device("cuda:0")
    finally:
        world.bound_device_id = None
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.tolist()


def test_a_group_in_a_world_that_is_bound_to_a_device_is_made_by_its_ranks_alone(two_ranks: RankPool) -> None:
    assert two_ranks.run(_group_in_a_bound_world) == [[1.0], [1.0]]
