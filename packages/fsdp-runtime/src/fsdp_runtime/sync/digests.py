"""Digests of weights: one number per tensor, independent of the sharding, to compare sent and received weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sharded import ModelState, all_reduce_over, block_view, hash_box, inside, own_rank
from fsdp_runtime.sync.execute import box_views, torch_dtype
from fsdp_runtime.sync.groups import rank_in
from fsdp_runtime.sync.model_layout import ModelShards, present_tensors
from fsdp_runtime.weights import WeightExport
from tp_plans.boxes import Box, box_shape
from tp_plans.transfer import TransferLayout, TransferPlan, plan_cover


def digest(model: nn.Module, *, export: WeightExport = WeightExport()) -> dict[str, int]:
    """Return one number per exported weight, by name in model order on every rank, independent of the sharding.

    A 64-bit hash of every element's bits and position in the full tensor; one rank hashes each element,
    and the ranks' sums are added.  Not cryptographic.  Collective over the model's ranks: one all-reduce
    per mesh axis, of eight bytes per tensor.

    Args:
        model: plain or parallelized.
        export: names, dtype and precision of the hashed weights, as in :class:`ModelShards`.

    Raises:
        ConversionError, OptionError: as :class:`ModelShards`.

    Example:
        >>> import copy, torch
        >>> from fsdp_runtime.sync import digest
        >>> model = torch.nn.Linear(2, 3)
        >>> digest(model) == digest(copy.deepcopy(model))
        True
    """
    shards = ModelShards(model, export=export)
    shards.refresh()
    return _digests(shards.layout, shards.local, own_rank(), ModelState(model).ranks.groups)


def digest_layout(
    layout: TransferLayout, local: Mapping[str, Tensor], *, group: ProcessGroup | None = None
) -> dict[str, int]:
    """Return the digests of a layout's tensors by checkpoint name, as :func:`digest` of a model with the same values.

    For an engine's side of a transfer.  Of replicas only one rank is hashed; :func:`verify_transfer` compares all.
    Collective over the group.

    Args:
        layout: a layout on the ranks of ``group``.
        local: this rank's local tensors.
        group: the process group; ``None`` for the world, or for this process alone.

    Raises:
        WeightSyncError: a local tensor is missing or too small.

    Example:
        >>> import torch
        >>> from fsdp_runtime.sync import ModelShards, digest, digest_layout
        >>> model = torch.nn.Linear(2, 3)
        >>> shards = ModelShards(model)
        >>> digest_layout(shards.layout, shards.local) == digest(model)
        True
    """
    return _digests(layout, local, rank_in(group), _groups(group))


def verify_transfer(
    plan: TransferPlan,
    *,
    source: Mapping[str, Tensor] | ModelShards | None = None,
    destination: Mapping[str, Tensor] | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Raise unless every block of a plan's destination equals its source, copies and replicas included.

    Collective over the ranks of the group: one all-reduce of sixteen bytes per tensor.

    Args:
        plan: the plan of the transfer.
        source: this rank's local tensors, if it sends, or their :class:`ModelShards`.
        destination: this rank's local tensors, if it receives.
        group: the process group; ``None`` for the world.

    Raises:
        WeightSyncError: tensors differ; the error, on every rank, lists tensors and ranks with wrong values.

    Example:
        >>> import torch, tp_plans
        >>> from fsdp_runtime.sync import ModelShards, execute_transfer, verify_transfer
        >>> shards, target = ModelShards(torch.nn.Linear(2, 3)), ModelShards(torch.nn.Linear(2, 3))
        >>> plan = tp_plans.transfer.plan_transfer(shards.layout, target.layout)
        >>> execute_transfer(plan, source=shards.local, destination=target.local)
        >>> verify_transfer(plan, source=shards.local, destination=target.local)
    """
    rank = rank_in(group)
    values = present_tensors(source)
    position = {name: index for index, name in enumerate(plan.destination.tensors)}
    sent, arrived = Counter[tuple[int, str]](), Counter[tuple[int, str]]()  # hashes by rank and tensor
    totals = torch.zeros(2, len(position), dtype=torch.int64)
    for transfer in plan.for_rank(rank, direct=True):
        if transfer.source != rank:
            continue
        # If the destination stores an element in several tensors, the element counts once per tensor.
        for part, _ in plan.destination.within(transfer.destination, transfer.tensor, transfer.box):
            value = _hash(plan.source, rank, values, transfer.tensor, part)
            sent[transfer.destination, transfer.tensor] += value
            totals[0, position[transfer.tensor]] += value
    for name in position:
        for block in plan.destination.stored(rank, name):
            view = block_view(destination or {}, name, block, block.box).to(torch_dtype(plan.destination, name))
            value = int(hash_box(view, plan.destination.tensors[name].shape, block.box))
            arrived[rank, name] += value
            totals[1, position[name]] += value
    totals = all_reduce_over(_groups(group), totals.view(-1), dist.ReduceOp.SUM).view_as(totals)
    differing = [name for name, index in position.items() if totals[0, index] != totals[1, index]]
    if differing:
        raise WeightSyncError(_describe(differing, sent, arrived, group))


def _describe(
    differing: Sequence[str],
    sent: Mapping[tuple[int, str], int],
    arrived: Mapping[tuple[int, str], int],
    group: ProcessGroup | None,
) -> str:
    """The message of a failed verification, equal on every rank; collective."""
    names = set(differing)
    own = [{key: value for key, value in side.items() if key[1] in names} for side in (sent, arrived)]
    gathered = [own]
    if _groups(group):
        gathered = [own] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
    excess = Counter[tuple[int, str]]()  # of arrived hashes over sent hashes
    for rank_sent, rank_arrived in gathered:
        excess.update(rank_arrived)
        excess.subtract(rank_sent)
    ranks = {key for _, part in gathered for key in part if excess[key] % 2**64}  # torch's sums wrap around
    lines = [
        f"  {name}: on ranks {', '.join(str(rank) for rank, other in sorted(ranks) if other == name)}"
        for name in differing
    ]
    return (
        f"{len(differing)} tensors differ between the trainer and the engine:\n" + "\n".join(lines) + "\nthe trainer "
        "changed them later, the transfer is incomplete, or the engine overwrote them: transfer in full again"
    )


def _digests(
    layout: TransferLayout, local: Mapping[str, Tensor], rank: int, groups: Sequence[ProcessGroup]
) -> dict[str, int]:
    """Return each tensor's digest: a sum in which one rank adds each element."""
    partial_sums = torch.zeros(len(layout.tensors), dtype=torch.int64)
    position = {name: index for index, name in enumerate(layout.tensors)}
    for transfer in plan_cover(layout, rank=rank):
        partial_sums[position[transfer.tensor]] += _hash(layout, rank, local, transfer.tensor, transfer.box)
    return dict(zip(layout.tensors, all_reduce_over(groups, partial_sums, dist.ReduceOp.SUM).tolist(), strict=True))


def _hash(layout: TransferLayout, rank: int, local: Mapping[str, Tensor], name: str, box: Box) -> int:
    """Return the hash of a box that a rank stores in one or several blocks."""
    values = None
    for part, view in box_views(layout, rank, local, name, box):
        if part == box:
            values = view.to(torch_dtype(layout, name))
            break
        if values is None:
            values = torch.empty(box_shape(box), dtype=torch_dtype(layout, name), device=view.device)
        values[inside(box, part)].copy_(view)
    return 0 if values is None else int(hash_box(values, layout.tensors[name].shape, box))


def _groups(group: ProcessGroup | None) -> Sequence[ProcessGroup]:
    chosen = dist.group.WORLD if group is None else group
    return [] if chosen is None else [chosen]
