"""Process groups and their collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store


def all_gather_flat(output: Tensor, own: Tensor, group: ProcessGroup) -> dist.Work:
    """Start an all-gather of flat tensors; torch 2.13 renamed the function, and the old name warns."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(output, own, group=group, async_op=True)
    return work


def reduce_scatter_flat(output: Tensor, full: Tensor, group: ProcessGroup) -> dist.Work:
    """Start a reduce-scatter of flat tensors; torch 2.13 renamed the function."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = scatter(output, full, group=group, async_op=True)
    return work


def waited(tensor: Tensor) -> Tensor:
    """Return the result of an asynchronous functional collective, complete; other tensors unchanged."""
    # ``AsyncCollectiveTensor`` is private in torch 2.11 to 2.15, and local tensors of DTensors are such tensors.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    complete: Tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
    return complete


def clone_default_store() -> Store:
    """A new connection to the store of ``init_process_group``; torch 2.11 to 2.15 have no public function for it."""
    store: Any = distributed_c10d._get_default_store()
    copy: Store = store.clone()
    return copy


def separate_group(
    store: Store, rank: int, world_size: int, name: str, backend: str, timeout: timedelta
) -> ProcessGroup:
    """Form a group outside the world; ``ValueError`` for a used name, ``RuntimeError`` if ranks do not arrive."""
    # torch 2.11 to 2.15 form groups of the world's ranks only (pytorch/pytorch#151960); SGLang and OpenRLHF call the
    # same function. Point-to-point operations look up the ranks that are registered here.
    helper: Any = distributed_c10d._new_process_group_helper
    world: Any = distributed_c10d._world
    prefixed = PrefixStore(name, store)
    prefixed.set_timeout(timeout)
    group: ProcessGroup
    group, _ = helper(world_size, rank, [], backend, prefixed, group_name=f"separate/{name}", timeout=timeout)
    world.pg_group_ranks[group] = {number: number for number in range(world_size)}
    return group


def gloo_beneath(group: ProcessGroup, store: Store, timeout: timedelta, devices: list[str]) -> ProcessGroup:
    """Return a gloo group of the ranks of a group that is written in Python, and register gloo there for devices."""
    # torch 2.11 to 2.15 set a group's backends by private methods; its own Python groups of tests do the same.
    gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    beneath = ProcessGroup(store, group.rank(), group.size())
    for one, backend, names in ((beneath, "GLOO", ["cpu"]), (group, "CUSTOM", devices)):
        kind = getattr(ProcessGroup.BackendType, backend)
        one._set_default_backend(kind)
        for name in names:
            one._register_backend(torch.device(name), kind, gloo)
    return beneath


def group_of(value: object) -> ProcessGroup | None:
    """Return an operator's argument as a process group, if it is a group or a group's name, else ``None``."""
    # Names are resolved by a private function in torch 2.11 to 2.15.
    if isinstance(value, ProcessGroup):
        return value
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return ProcessGroup.unbox(value)
    if isinstance(value, str):
        try:
            return cast("ProcessGroup", getattr(distributed_c10d, "_resolve_process_group")(value))  # noqa: B009
        except (RuntimeError, ValueError, LookupError):
            return None
    return None


#: Inductor's switch for async tensor parallelism, private in torch 2.11 to 2.15; torchtitan sets it too.
MICRO_PIPELINE = "_micro_pipeline_tp"


def enable_symmetric_memory(group: ProcessGroup) -> None:
    """Let ranks of a group read each other's memory; the module is private in torch 2.11 to 2.15."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(group.group_name)
