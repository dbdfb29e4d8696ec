"""The ranks that hold a model together, and how they all learn that one of them failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import root_mesh
from fsdp_runtime.errors import OtherRankError
from fsdp_runtime.weights.entries import entries


@dataclass(frozen=True)
class Ranks:
    """Process groups that together connect every rank of a model, and whether this rank is the first of them."""

    groups: Sequence[ProcessGroup]
    is_first: bool


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks of the mesh that the model is on, replicas included; this rank alone for a model of plain tensors."""
    on_mesh = next((entry.tensor for entry in entries(model) if isinstance(entry.tensor, DTensor)), None)
    if on_mesh is None:
        return Ranks(groups=(), is_first=True)
    mesh = root_mesh(on_mesh.device_mesh)
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    return Ranks(groups, is_first=not any(mesh.get_coordinate() or ()))


def ranks_of_world() -> Ranks:
    """Every rank of the world, or this process alone where ``torch.distributed`` is not running."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return Ranks(groups=() if world is None else (world,), is_first=world is None or dist.get_rank() == 0)


@contextmanager
def all_or_none(ranks: Ranks) -> Iterator[None]:
    """Run a rank-local step on every rank; if it raises on one, it raises on all.

    Raises:
        OtherRankError: another rank failed; what it raised itself is raised there.
    """
    try:
        yield
    except Exception as error:
        _tell(ranks, f"{type(error).__name__}: {error}")
        raise
    if failures := _tell(ranks, None):
        raise OtherRankError("\n".join(f"rank {rank}: {message}" for rank, message in sorted(failures.items())))


def _tell(ranks: Ranks, message: str | None) -> dict[int, str]:
    """What every rank that failed says: axis by axis, so that each hears of the whole mesh."""
    known = {} if message is None else {dist.get_rank() if dist.is_initialized() else 0: message}
    for group in ranks.groups:
        heard: list[dict[int, str]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(heard, known, group=group)
        known = {rank: said for part in heard for rank, said in part.items()}
    return known
