"""Execute a transfer plan over a process group, a bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.sync.groups import DEFAULT_TIMEOUT, rank_in
from fsdp_runtime.sync.handshake import Handshake
from fsdp_runtime.sync.local_sides import Sides
from fsdp_runtime.sync.model_layout import ModelShards, present_tensors
from fsdp_runtime.sync.point_to_point import SHARED_BUCKETS, PointToPoint
from fsdp_runtime.sync.rank_rounds import RankRounds
from fsdp_runtime.sync.schedule import schedule_rounds, split_transfers
from fsdp_runtime.sync.shared_buckets import SharedBuckets
from fsdp_runtime.weights.stream import DEFAULT_BUCKET_BYTES
from tp_plans.transfer import TransferPlan


@torch.no_grad()
def execute_transfer(
    plan: TransferPlan,
    *,
    source: Mapping[str, Tensor] | ModelShards | None = None,
    destination: Mapping[str, Tensor] | None = None,
    group: ProcessGroup | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    timeout: timedelta = DEFAULT_TIMEOUT,
    device: torch.device | str | None = None,
    shared_memory: bool = False,
    on_round: Callable[[int, int], object] | None = None,
) -> None:
    """Send blocks of weights from their ranks to where a plan says, shard to shard.

    Collective over the ranks of the plan; others need not call.  Each round sends and receives point to point
    (``batch_isend_irecv``, with gloo and NCCL), from and into one buffer of at most ``bucket_bytes``.  Values are
    converted to the plan's dtypes as they are packed and to the destination's as they are unpacked.

    Args:
        plan: the same on every rank; its ranks are those of ``group``.
        source: this rank's local tensors, if it sends, or the :class:`ModelShards` that has them.
        destination: this rank's local tensors to fill, if it receives.
        group: the process group; ``None`` for the world.
        bucket_bytes: the most bytes that this rank holds besides its tensors.
        timeout: how long a round may take.  With NCCL the group's own timeout applies.
        device: where the buffer is; ``None`` for the device of the first local tensor.  Shards that are offloaded to
            the host need the group's device here.
        shared_memory: let ranks of one host hand messages over in memory that they share, in one bucket a rank; the
            group then carries one byte for each and one that it was taken.  On every rank, or on none.
        on_round: called after each round with the number of rounds that are complete and of all rounds.

    Raises:
        OptionError: a bucket is smaller than an element, or the machine has no ``/dev/shm`` for ``shared_memory``.
        OSError: it has not enough room there.
        WeightSyncError: a local tensor is missing or too small (before anything is sent), or another rank did not
            take part in a round within ``timeout``; the destination then holds parts of old and of new weights.

    Example:
        >>> import torch, tp_plans
        >>> from fsdp_runtime.sync import ModelShards, execute_transfer
        >>> trained, engine = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
        >>> shards, target = ModelShards(trained), ModelShards(engine)
        >>> plan = tp_plans.transfer.plan_transfer(shards.layout, target.layout)
        >>> execute_transfer(plan, source=shards.local, destination=target.local)
        >>> torch.equal(trained.weight, engine.weight)
        True
    """
    rank = rank_in(group)
    sides = Sides(plan, rank, present_tensors(source), destination or {})
    sides.require_tensors()
    for each in split_transfers(plan, bucket_bytes):
        if each.is_local and each.source == rank:
            sides.copy(each)
    rounds, peers = schedule_rounds(plan, bucket_bytes), PointToPoint(rank, group, timeout)
    where = torch.device(device) if device is not None else sides.device
    with ExitStack() as stack:
        shared = None
        if shared_memory and rounds:
            handshake = Handshake(plan.ranks or (rank,), peers, where, SHARED_BUCKETS)
            shared = stack.enter_context(SharedBuckets(rounds, rank, handshake))
        rank_rounds = RankRounds(rounds, sides, peers, where, shared)
        for number, messages in enumerate(rounds):
            rank_rounds.run(messages)
            if on_round is not None:
                on_round(number + 1, len(rounds))
