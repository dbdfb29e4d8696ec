"""Groups of transfers: refused or ended in time where they cannot be formed, and apart from the world."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tp_plans
from fsdp_runtime import OptionError
from fsdp_runtime.sync import WeightSyncError, execute_transfer, transfer_group
from harness.ranks import RankPool
from tp_plans import Replicate
from tp_plans.transfer import CheckpointTensor


def test_a_group_without_all_of_its_ranks_ends_in_time() -> None:
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 could not join the group 'alone', after [0-9.]+ of 0\.5 s"):
        transfer_group(dist.HashStore(), 0, 2, name="alone", timeout=timedelta(seconds=0.5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank=2, world_size=2: give a rank from 0 to"),
        ({"backend": "glue"}, "backend='glue': give one of"),
        ({"backend": "cpu:glue,cuda:nccl"}, "give one of"),
    ],
)
def test_what_no_group_can_be_formed_of_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        transfer_group(**{"store": dist.HashStore(), "rank": 0, "world_size": 2, **change})


def test_a_name_that_is_in_use_is_refused_and_can_be_used_again_afterwards() -> None:
    group = transfer_group(dist.HashStore(), 0, 1, name="same")
    with pytest.raises(OptionError, match="name='same': this process has a group of that name"):
        transfer_group(dist.HashStore(), 0, 1, name="same")
    dist.destroy_process_group(group)
    dist.destroy_process_group(transfer_group(dist.HashStore(), 0, 1, name="same"))


def _reversed(folder: Path) -> tuple[int, list[float]]:
    """A transfer in a group in which the ranks of the world have other numbers."""
    rank = 1 - dist.get_rank()
    group = transfer_group(dist.FileStore(str(folder / "store"), 2), rank, 2, name="reversed")
    tensors = {"w": CheckpointTensor((3,), "float32")}
    one, other = (tp_plans.transfer.mesh_layout(tensors, (1,), {"w": [Replicate()]}, ranks=[each]) for each in (0, 1))
    local = {"w": torch.full((3,), float(rank))}
    sides = {"source": local} if rank == 0 else {"destination": local}
    execute_transfer(tp_plans.transfer.plan_transfer(one, other), group=group, **sides)
    dist.destroy_process_group(group)
    dist.barrier()  # the world is as it was
    return rank, local["w"].tolist()


def test_ranks_of_a_plan_are_those_of_the_group_and_the_world_goes_on(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(_reversed, tmp_path) == [(1, [0.0] * 3), (0, [0.0] * 3)]
