"""Gather the full tensors of a bucket of parameters at once.

DTensor's ``full_tensor()`` waits for each parameter in turn.  Here all gathers of a bucket are in flight together, and
the shards of small parameters share one all-gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import all_gather_flat
from fsdp_runtime.sharded.boxes import dtensor_box, shard_steps
from fsdp_runtime.sharded.collectives import own_rank
from tp_plans.boxes import ShardStep

#: Shards of at least this many bytes have an all-gather each, which avoids two copies through a shared buffer.
_MIN_BYTES_ALONE = 2**20
#: Alignment of a tensor in a shared buffer, in bytes: a multiple of every dtype's size.
_ALIGNMENT = 16


@dataclass
class _GatherStep:
    """A gather over one mesh axis."""

    group: ProcessGroup
    shard: ShardStep
    size: int  # full size of the sharded dim
    to: int | None  # the only global rank that receives the chunks


@dataclass
class _PendingGather:
    tensor: Tensor
    steps: list[_GatherStep]  # remaining steps; the last step runs first

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of the last step's padded chunk, the sharded dim first; equal on all ranks of its group."""
        step = self.steps[-1]
        return (step.shard.chunk_size(step.size), *self.tensor.movedim(step.shard.dim, 0).shape[1:])

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the last step's padded chunk."""
        return prod(self.chunk_shape) * self.tensor.itemsize


@dataclass(frozen=True)
class _GatheredChunks:
    """The chunks of one tensor in a buffer that a gather fills, one row of bytes per rank."""

    rows: Tensor  # ``[ranks, bytes]``, uint8; on a rank that only sends, the sent row
    work: dist.Work
    offset: int  # offset of the tensor's chunk in each row, in bytes
    shape: tuple[int, ...]  # shape of one rank's padded chunk, the sharded dim first
    dtype: torch.dtype
    step: _GatherStep

    def tensor(self) -> Tensor:
        """Wait for the gather and return the tensor, gathered over one axis."""
        self.work.wait()
        count = prod(self.shape) * self.dtype.itemsize
        chunks = self.rows[:, self.offset : self.offset + count].view(self.dtype)
        padded = chunks.reshape(len(self.rows) * self.shape[0], *self.shape[1:])
        # Only the last chunks are padded, so all padding is at the end.
        return padded.narrow(0, 0, self.step.size).movedim(0, self.step.shard.dim)


def full_tensors(
    tensors: Sequence[Tensor], *, dtypes: Sequence[torch.dtype] | None = None, to: int | None = None
) -> Iterator[Tensor]:
    """Return an iterator over the full tensors in order; plain tensors are unchanged.  Collective."""
    # Tensors are converted to ``dtypes`` first. On return all communication has started. With ``to``, a global rank,
    # each shard is sent toward that rank only, once per axis; the other ranks exhaust the iterator and ignore its
    # tensors.
    sent = tensors if dtypes is None else [tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    pending = [_pending(tensor.detach(), to) for tensor in sent]
    ready: list[Tensor | _GatheredChunks] = [item.tensor for item in pending]
    while waiting := [index for index, item in enumerate(pending) if item.steps]:
        by_group: dict[ProcessGroup, list[int]] = {}
        for index in waiting:
            by_group.setdefault(pending[index].steps[-1].group, []).append(index)
        for members in by_group.values():
            gathered = _gather([pending[index] for index in members])
            for index, chunks in zip(members, gathered, strict=True):
                pending[index].steps.pop()
                ready[index] = chunks
                if pending[index].steps:
                    pending[index].tensor = chunks.tensor()
                else:
                    pending[index].tensor = torch.empty(0)  # the buffer holds its bytes now
            del gathered
    pending.clear()
    return _completed(ready, is_needed=to is None or to == own_rank())


def _completed(ready: list[Tensor | _GatheredChunks], *, is_needed: bool) -> Iterator[Tensor]:
    for index, value in enumerate(ready):
        ready[index] = torch.empty(0)
        if not isinstance(value, _GatheredChunks):
            yield value
        elif is_needed:
            yield value.tensor().contiguous()
        else:
            value.work.wait()
            yield torch.empty(0)


def _pending(tensor: Tensor, to: int | None) -> _PendingGather:
    if not isinstance(tensor, DTensor):
        return _PendingGather(_computed(tensor), [])
    dtensor_box(tensor)  # raises if the local tensor does not have the shape its placements imply
    mesh = tensor.device_mesh
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    places = None if to is None else (mesh.mesh == to).nonzero().tolist()
    if places == []:  # ``to`` is outside of the tensor's mesh
        return _PendingGather(tensor.to_local(), [])
    place = places[0] if places else None
    size, steps = list(tensor.shape), []
    for step in shard_steps(tensor.placements, mesh.shape):
        if step.num_chunks > 1:
            group = mesh.get_group(step.axis)
            receiver = None if place is None else dist.get_process_group_ranks(group)[place[step.axis]]
            steps.append(_GatherStep(group, step, size[step.dim], receiver))
        size[step.dim] = step.chunk_range(size[step.dim], coordinate[step.axis])[1]
    if place is not None:
        differing = {axis for axis, (a, b) in enumerate(zip(place, coordinate, strict=True)) if a != b}
        needed = next((n for n in range(len(steps) + 1) if differing <= {s.shard.axis for s in steps[:n]}), None)
        # Gathers run from the last step to the first; this rank takes part until it has sent its chunks.
        steps = [] if needed is None else steps[max(needed - 1, 0) :]
    # Offloaded shards are on the CPU; collectives run on the mesh's device.
    return _PendingGather(_computed(tensor.to_local()).to(mesh.device_type), steps)


def _computed(local: Tensor) -> Tensor:
    """Return the values of a tensor that computes them, such as a view of packed bytes; any other tensor unchanged."""
    return local if type(local) in (Tensor, nn.Parameter, nn.Buffer) else local.clone()


def _gather(pending: list[_PendingGather]) -> list[_GatheredChunks]:
    """Start the gathers of each tensor's last step: one per large shard, and one for all other shards."""
    small = [item for item in pending if item.chunk_bytes < _MIN_BYTES_ALONE]
    batches = [[item] for item in pending if item.chunk_bytes >= _MIN_BYTES_ALONE] + ([small] if small else [])
    chunks = {id(item): chunk for batch in batches for item, chunk in zip(batch, _start_gather(batch), strict=True)}
    return [chunks[id(item)] for item in pending]


def _start_gather(batch: list[_PendingGather]) -> list[_GatheredChunks]:
    """Start one gather for the last steps of ``batch``; they share the group and the receiver."""
    shards = [item.tensor.movedim(item.steps[-1].shard.dim, 0) for item in batch]
    shapes, offsets, total = [item.chunk_shape for item in batch], [], 0
    for item in batch:
        offsets.append(total)
        total += -(-item.chunk_bytes // _ALIGNMENT) * _ALIGNMENT
    total = max(total, _ALIGNMENT)  # an empty row could not be viewed as other dtypes
    if len(shards) == 1 and shards[0].is_contiguous() and shards[0].nbytes == total:
        local = shards[0].view(-1).view(torch.uint8)
    else:
        local = torch.empty(total, dtype=torch.uint8, device=shards[0].device)
        for shard, offset, shape in zip(shards, offsets, shapes, strict=True):
            chunk = local[offset : offset + prod(shape) * shard.itemsize].view(shard.dtype).view(shape)
            chunk[: len(shard)].copy_(shard)
    group, to = batch[0].steps[-1].group, batch[0].steps[-1].to
    receives = to in (None, own_rank())
    rows = local.new_empty(dist.get_world_size(group), total) if receives else local[None]
    if to is None:
        work = all_gather_flat(rows.view(-1), local, group)
    else:
        work = dist.gather(local, list(rows) if receives else None, to, group, async_op=True)
    return [
        _GatheredChunks(rows, work, offset, shape, item.tensor.dtype, item.steps[-1])
        for item, offset, shape in zip(batch, offsets, shapes, strict=True)
    ]
