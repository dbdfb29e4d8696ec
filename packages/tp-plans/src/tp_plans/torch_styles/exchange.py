"""Rows of a weight brought to the ranks that compute with them, and their gradients brought back.

A fused weight, or one with fewer heads than ranks, is stored as an ordinary ``Shard``, so that whoever saves,
reshards or gathers it sees its rows in order.  The rows that a rank computes with are others: they are fetched
in forward, one ``1 / tp`` of the weight a rank, and their gradients are returned and summed in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tp_plans.rows import overlap, stored_rows


@dataclass(frozen=True)
class RowExchange:
    """What one rank sends and receives.

    Args:
        size: rows of the whole weight.
        used: the rows that each rank computes with, from ``tp_plans.rows.used_rows``.
        rank: this rank's place on the axis.
    """

    size: int
    used: Sequence[Sequence[range]]
    rank: int

    @cached_property
    def needed(self) -> bool:
        """Whether any rank computes with other rows than it stores."""
        stored = stored_rows(self.size, len(self.used))
        return any(list(_joined(rows)) != list(own) for rows, own in zip(self.used, stored, strict=True))

    @cached_property
    def sent(self) -> list[list[range]]:
        """For every rank, which of the rows stored here it gets."""
        own = stored_rows(self.size, len(self.used))[self.rank]
        return [overlap(rows, own) for rows in self.used]

    @cached_property
    def received(self) -> list[int]:
        """How many rows come from every rank."""
        stored = stored_rows(self.size, len(self.used))
        return [sum(map(len, overlap(self.used[self.rank], chunk))) for chunk in stored]

    def __call__(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """From the rows stored here ``[stored, ...]`` to the rows used here ``[used, ...]``; differentiable."""
        out = torch.cat([local[rows.start : rows.stop] for to_rank in self.sent for rows in to_rank] or [local[:0]])
        counts = [sum(map(len, to_rank)) for to_rank in self.sent]
        return cast(Tensor, _AllToAll.apply(out, mesh, self.received, counts))  # type: ignore[no-untyped-call]


def _joined(rows: Sequence[range]) -> Sequence[int]:
    return [row for part in rows for row in part]


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks that use them forward; their gradients to the ranks that sent them backward."""

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
    return arrived
