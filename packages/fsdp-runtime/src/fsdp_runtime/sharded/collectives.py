"""Find the ranks that hold a model; gather objects over these ranks, and raise one rank's error on all."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import root_mesh
from fsdp_runtime.errors import OptionError, OtherRankError
from fsdp_runtime.mesh.spec import axis_size
from fsdp_runtime.model.stages import recorded_meshes

#: Packages with loggers that :func:`first_rank_speaks` silences.
_PACKAGES = ("fsdp_runtime", "tp_plans")


@dataclass(frozen=True)
class ModelRanks:
    """The ranks that hold a model, and process groups that together connect all of them."""

    groups: Sequence[ProcessGroup] = ()  # one per mesh axis larger than 1
    index: int = 0  # this rank's index among them
    count: int = 1
    global_first: int = 0  # global rank of the rank with index 0
    rank: int = field(default_factory=lambda: own_rank())  # still known after destroy_process_group

    @property
    def is_first(self) -> bool:
        """Whether this rank has index 0, and so does the work that all ranks share."""
        return self.index == 0


def model_mesh(model: nn.Module, tensors: Iterable[Tensor]) -> DeviceMesh | None:
    """Return the mesh of a model with these tensors, ``None`` for plain tensors outside of pipeline stages."""
    on_mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    recorded = next(recorded_meshes(model), None)
    if on_mesh is None:
        return None if recorded is None or axis_size(recorded, "pp") == 1 else recorded
    # torch's caches of specs may give a DTensor the equal slice of an earlier mesh with other axes.
    return recorded or root_mesh(on_mesh)


def ranks_of(mesh: DeviceMesh | None) -> ModelRanks:
    """Return all ranks of a mesh; only this rank without a mesh."""
    if mesh is None:
        return ModelRanks(global_first=own_rank())
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    index = 0
    for size, coordinate in zip(mesh.shape, mesh.get_coordinate() or (0,) * mesh.ndim, strict=True):
        index = index * size + coordinate
    return ModelRanks(groups, index, mesh.size(), int(mesh.mesh.flatten()[0]))


def own_rank() -> int:
    """Return this process's rank in the world, 0 if ``torch.distributed`` is not initialized."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_ranks() -> ModelRanks:
    """Return every rank of the world, only this process if ``torch.distributed`` is not initialized."""
    if not dist.is_initialized():
        return ModelRanks()
    world = dist.group.WORLD
    return ModelRanks(() if world is None else (world,), dist.get_rank(), dist.get_world_size())


@contextmanager
def first_rank_speaks(groups: Sequence[ProcessGroup] | None = None) -> Iterator[None]:
    """Log below ERROR only on the first rank of all groups, or of the world, inside the ``with``."""
    groups = world_ranks().groups if groups is None else groups
    loggers = [] if all(dist.get_rank(group) == 0 for group in groups) else [*map(logging.getLogger, _PACKAGES)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclass
class RankStep:
    """This rank's picklable value of a :func:`raise_on_all` step; ``values`` has all ranks' values after the step."""

    value: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)  # by name; the same on every rank
    values: dict[int, Any] = field(default_factory=dict)


@contextmanager
def raise_on_all(ranks: ModelRanks) -> Iterator[RankStep]:
    """Run a rank-local step on every rank; an exception on one rank, or unequal options, raise on all.  Collective."""
    # The failed rank raises its own error, and all other ranks :class:`OtherRankError`.
    step = RankStep()
    try:
        yield step
    except Exception as error:
        with suppress(OtherRankError):  # this rank raises its own error
            all_gather_objects(ranks, (f"{type(error).__name__}: {error}", None, {}))
        raise
    results = all_gather_objects(ranks, (None, step.value, step.options))
    failures = {rank: message for rank, (message, _, _) in results.items() if message is not None}
    if failures:
        raise OtherRankError("\n".join(f"rank {rank}: {message}" for rank, message in sorted(failures.items())))
    step.values = {rank: value for rank, (_, value, _) in sorted(results.items())}
    require_equal_on_all({rank: options for rank, (_, _, options) in sorted(results.items())})


def require_equal_on_all(options: Mapping[int, Mapping[str, Any]]) -> None:
    """Check that every rank has the same options; they are given by rank and name."""
    first, expected = next(iter(options.items()))
    for rank, rank_options in options.items():
        for name, value in rank_options.items():
            if value != expected[name]:
                values = f"{expected[name]!r} on rank {first} and {value!r} on rank {rank}"
                raise OptionError(f"{name} is {values}: give the same on every rank")


#: Names, or parts of names, of backends for CPU tensors.
_CPU_BACKENDS = ("gloo", "mpi", "cpu", "fake")
#: Elements per all-reduce.
_REDUCED = 2**24


def required_device(groups: Sequence[ProcessGroup]) -> torch.device | None:
    """The accelerator on which groups need their tensors; ``None`` if they take tensors on the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if not groups or accelerator is None or any(name in dist.get_backend(groups[0]) for name in _CPU_BACKENDS):
        return None
    return accelerator


def all_reduce_over(groups: Sequence[ProcessGroup], tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduce a one-dimensional tensor over several groups, on their backend's device; the input may be overwritten."""
    if not tensor.numel():
        return tensor
    reduced = tensor.to(required_device(groups) or tensor.device)
    for group in groups:
        for start in range(0, len(reduced), _REDUCED):
            dist.all_reduce(reduced[start : start + _REDUCED], op, group=group)
    return reduced.to(tensor.device)


def all_gather_objects(ranks: ModelRanks, value: Any) -> dict[int, Any]:
    """All-gather a picklable value; return the values by global rank.  One collective per group."""
    values = {ranks.rank: value}
    for group in ranks.groups:
        # Not for the first group: torch has forgotten its ranks if a save ends after destroy_process_group.
        if len(values) > 1 and set(dist.get_process_group_ranks(group)) <= values.keys():
            continue
        gathered: list[dict[int, Any]] = [{}] * group.size()
        try:
            dist.all_gather_object(gathered, values, group=group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise OtherRankError(
                f"a rank has ended, or does not answer rank {ranks.rank}; all ranks of the model must make this call: "
                f"{reason}"
            ) from error
        values = {rank: item for part in gathered for rank, item in part.items()}
    return values
