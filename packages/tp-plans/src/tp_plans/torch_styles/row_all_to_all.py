"""Rows of a weight brought to the ranks that compute with them, and their gradients brought back.

A fused weight, or one with fewer heads than ranks, is stored as an ordinary ``Shard``, so that whoever saves,
reshards or gathers it sees its rows in order.  The rows that a rank computes with are others: they are fetched
in forward, one ``1 / tp`` of the weight a rank, and their gradients are returned and summed in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tp_plans.row_ranges import intersect, shard_ranges


@dataclass(frozen=True)
class RowExchange:
    """The rows that one rank sends and receives.

    Args:
        size: rows of the full weight.
        used: the rows that each rank computes with, from ``tp_plans.row_ranges.compute_ranges``.
        rank: this rank's place on the axis.
    """

    size: int
    used: Sequence[Sequence[range]]
    rank: int
    #: True if any rank computes with other rows than it stores.
    needed: bool = field(init=False)
    #: For every rank, which of the rows stored here it gets, counted from the first stored here.
    sent: list[list[range]] = field(init=False)
    #: The number of rows from every rank.
    received: list[int] = field(init=False)

    def __post_init__(self) -> None:
        stored = shard_ranges(self.size, len(self.used))
        unlike = (_joined(rows) != list(own) for rows, own in zip(self.used, stored, strict=True))
        # Computed once and here: the compiler traces a call, and cannot trace what computes at first use.
        object.__setattr__(self, "needed", any(unlike))
        object.__setattr__(self, "sent", [intersect(rows, stored[self.rank]) for rows in self.used])
        received = [sum(map(len, intersect(self.used[self.rank], chunk))) for chunk in stored]
        object.__setattr__(self, "received", received)

    def __call__(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """From the rows stored here ``[stored, ...]`` to the rows used here ``[used, ...]``; differentiable."""
        out = torch.cat([local[rows.start : rows.stop] for to_rank in self.sent for rows in to_rank] or [local[:0]])
        counts = [sum(map(len, to_rank)) for to_rank in self.sent]
        return cast(Tensor, _AllToAll.apply(out, mesh, self.received, counts))  # type: ignore[no-untyped-call]


def _joined(rows: Sequence[range]) -> list[int]:
    return [row for part in rows for row in part]


class _AllToAll(torch.autograd.Function):
    """All-to-all of weight rows; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: DeviceMesh, received: list[int], sent: list[int]) -> Tensor:
        ctx.mesh, ctx.received, ctx.sent = mesh, received, sent
        return _all_to_all(rows, mesh, received, sent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.mesh, ctx.sent, ctx.received), None, None, None


def _all_to_all(rows: Tensor, mesh: DeviceMesh, received: list[int], sent: list[int]) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=mesh.get_group())
    # A view: torch 2.11's compiler gives no gradient to an autograd function whose output was written in place.
    return arrived.view_as(arrived)
