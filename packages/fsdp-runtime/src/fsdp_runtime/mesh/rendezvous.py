"""Rank, world size and rendezvous of this process, from the environment of torchrun or Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_runtime.errors import MeshError

#: Slurm provides no port: the job id selects a port of this range, so jobs on one node get different ports.
_FIRST_PORT, _PORTS = 20000, 10000


@dataclass(frozen=True)
class RankInfo:
    """The place of one process in a job."""

    rank: int = 0  # index among all processes
    world_size: int = 1  # number of processes
    local_rank: int | None = None  # index among the processes of its machine; also the index of its device
    init_method: str | None = None  # rendezvous URL for ``init_process_group``; ``None`` for a single process


def rank_info_from_env(environment: Mapping[str, str] | None = None) -> RankInfo:
    """Read torchrun's variables, else a Slurm step's (``srun``), else return a single process.

    Args:
        environment: environment variables, by default this process's.

    Raises:
        MeshError: variables are missing, or a variable is not an integer.

    Example:
        >>> from fsdp_runtime.mesh import rank_info_from_env
        >>> rank_info_from_env({})
        RankInfo(rank=0, world_size=1, local_rank=None, init_method=None)
    """
    environment = os.environ if environment is None else environment
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _by_torchrun(environment)
    # A shell that salloc or sbatch opened has SLURM_NTASKS too, but only a task of srun has a step.
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _by_slurm(environment)
    return RankInfo()


def start_distributed(info: RankInfo, device_type: str) -> None:
    """Start ``torch.distributed``, with an accelerator's backend, and gloo for tensors on the CPU."""
    import torch  # not above: the command line reads meshes before torch is imported
    import torch.distributed as dist

    backend = "gloo"
    if device_type != "cpu":
        if info.local_rank is not None:
            torch.accelerator.set_device_index(info.local_rank)
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
    rendezvous: dict[str, Any] = {"init_method": info.init_method}
    if info.init_method is None:
        rendezvous = {"store": dist.HashStore()}  # type: ignore[attr-defined]
    dist.init_process_group(backend, rank=info.rank, world_size=info.world_size, **rendezvous)


def _by_torchrun(environment: Mapping[str, str]) -> RankInfo:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in environment]:
        raise MeshError(
            f"the environment has {', '.join(n for n in names if n in environment)} but not {', '.join(missing)}: "
            "start the job with torchrun, or unset them all for a single process"
        )
    local_rank = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else None
    _number(environment, "MASTER_PORT")
    # torchrun's agent listens at the address already, and env:// joins its store.
    return RankInfo(_number(environment, "RANK"), _number(environment, "WORLD_SIZE"), local_rank, "env://")


def _by_slurm(environment: Mapping[str, str]) -> RankInfo:
    names = ("SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if missing := [name for name in names if name not in environment] + ([] if nodes else ["SLURM_STEP_NODELIST"]):
        raise MeshError(f"a Slurm step without {', '.join(missing)}: start the job with srun")
    host = environment.get("MASTER_ADDR") or first_host(str(nodes))
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT")
    else:
        port = _FIRST_PORT + _number(environment, "SLURM_JOB_ID") % _PORTS
    rank, world_size = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS")
    return RankInfo(rank, world_size, _number(environment, "SLURM_LOCALID"), f"tcp://{host}:{port}")


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: ``node007`` of ``node[007-012,020],login1``."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return name.split(",")[0]
    first = re.match(r"\d+", rest)
    if first is None:
        raise MeshError(f"{nodes!r} is not a Slurm node list: set MASTER_ADDR to the host of rank 0")
    return name + first[0] + rest.partition("]")[2].partition(",")[0]


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise MeshError(f"{name}={environment[name]!r} in the environment is not an integer") from None
