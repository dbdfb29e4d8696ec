"""Where a process stands in its job, read from torchrun's and Slurm's variables."""

from __future__ import annotations

import os
import subprocess

import pytest

from fsdp_runtime import MeshError
from fsdp_runtime.mesh import RankInfo, rank_info_from_env
from fsdp_runtime.mesh.rendezvous import first_host
from harness.interpreter import environment

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_nothing_set_is_a_process_alone() -> None:
    assert rank_info_from_env({"HOME": "/"}) == RankInfo(0, 1, None, None)


def test_torchrun_is_met_where_its_agent_listens() -> None:
    assert rank_info_from_env({**SLURM, **TORCHRUN}) == RankInfo(5, 8, 1, "env://")


def test_slurm_meets_on_the_first_node_of_the_step() -> None:
    assert rank_info_from_env(SLURM) == RankInfo(5, 8, 1, "tcp://gpu07:23456")


def test_a_given_address_wins_over_slurms() -> None:
    given = {**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    assert rank_info_from_env(given).init_method == "tcp://10.0.0.1:4000"


def test_a_shell_that_salloc_opened_is_a_process_alone() -> None:
    shell = {name: value for name, value in SLURM.items() if name not in ("SLURM_STEP_ID", "SLURM_STEP_NODELIST")}
    assert rank_info_from_env(shell) == RankInfo()


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[007-012,020],login1", "node007"),
        ("login1,node[1-2]", "login1"),
        ("rack[2-3]-a,b", "rack2-a"),
    ],
)
def test_the_first_host_of_slurms_short_lists(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "has RANK, WORLD_SIZE but not MASTER_ADDR, MASTER_PORT: start the job with"),
        ({**TORCHRUN, "RANK": "five"}, "RANK='five' in the environment is not an integer"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "without SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_ID, SLURM_STEP"),
        ({**SLURM, "SLURM_STEP_NODELIST": "node[a-b]"}, "set MASTER_ADDR"),
    ],
)
def test_half_an_environment_is_refused_with_what_is_missing(environment: dict[str, str], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        rank_info_from_env(environment)


RANK = """
import torch, torch.distributed as dist
from fsdp_runtime import MeshSpec
mesh = MeshSpec(tp=-1).build(device_type="cpu")
total = torch.ones(())
dist.all_reduce(total, group=mesh.get_group("tp"))
print(dist.get_rank(), int(total), mesh.shape)
"""


def test_two_tasks_of_a_slurm_step_find_each_other() -> None:
    step = {**SLURM, "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    tasks = [
        subprocess.Popen(
            ["python", "-c", RANK],
            env=environment(**{**step, "SLURM_PROCID": rank}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [task.communicate(timeout=120)[0].strip().splitlines()[-1] for task in tasks]  # gloo of torch 2.10 talks too
    assert said == ["0 2 (1, 1, 1, 2)", "1 2 (1, 1, 1, 2)"]
