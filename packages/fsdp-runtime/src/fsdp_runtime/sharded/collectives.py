"""The ranks that hold a model together, and how they all learn that one of them failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import root_mesh
from fsdp_runtime.errors import OtherRankError
from fsdp_runtime.model.state import entries


@dataclass(frozen=True)
class Ranks:
    """Process groups that together connect every rank of a model.

    Args:
        groups: the groups, none for a single process.
        index: this rank's place among them, from 0.
        count: how many there are.
        first: the world's number of the first of them.
    """

    groups: Sequence[ProcessGroup] = ()
    index: int = 0
    count: int = 1
    first: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that does what one rank must do for all."""
        return self.index == 0


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks of the mesh that the model is on, replicas included; this rank alone for a model of plain tensors."""
    mesh = mesh_of(model)
    if mesh is None:
        return Ranks()
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    index = 0
    for size, coordinate in zip(mesh.shape, mesh.get_coordinate() or (0,) * mesh.ndim, strict=True):
        index = index * size + coordinate
    return Ranks(groups, index, mesh.size(), int(mesh.mesh.flatten()[0]))


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The whole mesh that the model is on, ``None`` for a model of plain tensors."""
    on_mesh = next((entry.tensor for entry in entries(model) if isinstance(entry.tensor, DTensor)), None)
    return None if on_mesh is None else root_mesh(on_mesh.device_mesh)


def ranks_of_world() -> Ranks:
    """Every rank of the world, or this process alone where ``torch.distributed`` is not running."""
    if not dist.is_initialized():
        return Ranks()
    world = dist.group.WORLD
    return Ranks(() if world is None else (world,), dist.get_rank(), dist.get_world_size())


@contextmanager
def all_or_none(ranks: Ranks) -> Iterator[None]:
    """Run a rank-local step on every rank; if it raises on one, it raises on all.

    Raises:
        OtherRankError: another rank failed; what it raised itself is raised there.
    """
    try:
        yield
    except Exception as error:
        tell_all(ranks, f"{type(error).__name__}: {error}")
        raise
    failures = {rank: message for rank, message in tell_all(ranks, None).items() if message is not None}
    if failures:
        raise OtherRankError("\n".join(f"rank {rank}: {message}" for rank, message in sorted(failures.items())))


def tell_all(ranks: Ranks, value: Any) -> dict[int, Any]:
    """What every rank says, by its number: axis by axis, so that each hears of the whole mesh.  Collective."""
    known = {dist.get_rank() if dist.is_initialized() else 0: value}
    for group in ranks.groups:
        heard: list[dict[int, Any]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(heard, known, group=group)
        known = {rank: said for part in heard for rank, said in part.items()}
    return known
