"""Messages in memory that ranks of a host share: the same bits, hardly a byte over the group, and nothing left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tp_plans
from fsdp_runtime import OptionError
from fsdp_runtime.sync import WeightSyncError, execute_transfer, shared_buckets
from fsdp_runtime.sync.schedule import rounds_of, split_transfers, windows_of
from fsdp_runtime.sync.tensor_views import box_views
from harness.memory import LiveBytes
from harness.ranks import RankPool
from tp_plans import Replicate, Shard
from tp_plans.transfer import CheckpointTensor, TransferLayout, TransferPlan

BUCKET = 4096
TENSORS = {"a": CheckpointTensor((67, 33), "float32"), "b": CheckpointTensor((31, 64)), "c": CheckpointTensor((9,))}


def _plans() -> list[TransferPlan]:
    """From two trainer ranks to two replicas; among all four ranks; and back."""
    two = {name: [Shard(0)] for name in TENSORS}
    four = {name: [Shard(len(tensor.shape) - 1), Replicate()] for name, tensor in TENSORS.items()}
    trainer, engines = (tp_plans.transfer.mesh_layout(TENSORS, (2,), two, ranks=ranks) for ranks in ([0, 1], [3, 2]))
    everyone = tp_plans.transfer.mesh_layout(TENSORS, (2, 2), four)
    copies = tp_plans.transfer.mesh_layout(TENSORS, (2,), {name: [Replicate()] for name in TENSORS}, ranks=[2, 3])
    pairs = [(trainer, engines), (trainer, everyone), (everyone, trainer)]
    return [
        *(tp_plans.transfer.plan_transfer(*pair) for pair in pairs),
        tp_plans.transfer.plan_transfer(trainer, copies, relay=True),
    ]


def _cut(layout: TransferLayout, rank: int, full: dict[str, Tensor] | None) -> dict[str, Tensor]:
    shapes = layout.local_shapes(rank)
    local = {name: torch.zeros(shape, dtype=getattr(torch, TENSORS[name].dtype)) for name, shape in shapes.items()}
    for name, tensor in (full or {}).items():
        for part, view in box_views(layout, rank, local, name, tuple((0, size) for size in tensor.shape)):
            view.copy_(tensor[tuple(slice(*side) for side in part)])
    return local


@contextmanager
def _counted() -> Iterator[list[int]]:
    """The bytes that this rank gives to its process group."""
    sent, send = [0], dist.batch_isend_irecv

    def count(operations: list[dist.P2POp]) -> Any:
        sent[0] += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return send(operations)

    dist.batch_isend_irecv = count
    try:
        yield sent
    finally:
        dist.batch_isend_irecv = send


def _transferred(shared: bool) -> list[tuple[bool, int, int, int, int]]:
    """Of each plan: right, bytes over the group, of the plan, messages of this rank, peak of extra memory."""
    rank, found = dist.get_rank(), []
    full = {
        name: torch.arange(math.prod(tensor.shape)).view(tensor.shape).to(getattr(torch, tensor.dtype))
        for name, tensor in TENSORS.items()
    }
    for plan in _plans():
        sides = {"source": _cut(plan.source, rank, full), "destination": _cut(plan.destination, rank, None)}
        with _counted() as sent, LiveBytes() as live:
            execute_transfer(plan, **sides, bucket_bytes=BUCKET, shared_memory=shared)
        wanted = _cut(plan.destination, rank, full)
        right = all(torch.equal(tensor, wanted[name]) for name, tensor in sides["destination"].items())
        own = split_transfers(plan, plan.for_rank(rank), BUCKET)
        windows = max(windows_of(plan, split_transfers(plan, plan.for_rank(r), BUCKET), BUCKET) for r in plan.ranks)
        messages = sum(map(len, rounds_of(plan, own, windows)))
        found.append((right, sent[0], plan.bytes_sent(rank), messages, live.peak))
    return found


def _left() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("fsdp-runtime-*")}


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_of_a_host_get_the_same_bits_without_sending_them(four_ranks: RankPool, shared: bool) -> None:
    for found in four_ranks.run(_transferred, shared):
        for right, sent, nbytes, messages, peak in found:
            assert right
            if shared:  # a number for each message, and those of the handshake
                assert sent <= 8 * messages + 600
                assert peak <= BUCKET  # each value is packed in the shared bucket
            else:  # and the number of windows, of each rank and of all
                assert nbytes <= sent <= nbytes + 200
    assert not _left()


def _refused(kind: str) -> str:
    plan = _plans()[0]
    rank = dist.get_rank()
    sides = {"source": _cut(plan.source, rank, None), "destination": _cut(plan.destination, rank, None)}
    if rank == 1:
        if kind == "no room":
            shared_buckets._mapped = _no_room
        else:
            shared_buckets._FOLDER = Path("/nowhere")
    try:
        execute_transfer(plan, **sides, shared_memory=True)
    except (WeightSyncError, OptionError, OSError) as error:
        return str(error)
    finally:
        shared_buckets._FOLDER, shared_buckets._mapped = Path("/dev/shm"), _MAPPED
    return ""


_MAPPED = shared_buckets._mapped


def _no_room(path: Path, nbytes: int) -> Any:
    path.touch()
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("kind", "reason"), [("no room", "No space left"), ("no folder", "has no /nowhere")])
def test_a_host_without_room_ends_every_rank_and_leaves_nothing(four_ranks: RankPool, kind: str, reason: str) -> None:
    told = four_ranks.run(_refused, kind)
    assert reason in told.pop(1)
    assert all("was not applied on any rank" in each for each in told)
    assert not _left()
