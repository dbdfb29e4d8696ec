"""Rows of a weight brought to the ranks that compute with them, and their gradients brought back.

A fused weight, or one with fewer heads than ranks, is stored as an ordinary ``Shard``: code that saves, reshards or
gathers it sees its rows in order.  A rank computes with other rows.  Forward fetches them, ``1 / tp`` of the weight per
rank, and backward returns and sums their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tp_plans.layouts import intersect, shard_ranges
from tp_plans.torch_styles._host_time_compat import direct
from tp_plans.torch_styles.collectives import group_of, without_history


class RowExchange:
    """The rows that one rank sends and receives; ``used`` has the rows that each rank computes with."""

    def __init__(self, size: int, used: Sequence[Sequence[range]], rank: int) -> None:
        stored = shard_ranges(size, len(used))
        in_order = ([row for part in rows for row in part] for rows in used)
        #: True if any rank computes with other rows than it stores.
        self.needed = any(rows != list(own) for rows, own in zip(in_order, stored, strict=True))
        #: For every rank, which of the rows stored here it gets, counted from the first stored here.
        self.sent = [intersect(rows, stored[rank]) for rows in used]
        #: The number of rows from every rank.
        self.received = [sum(map(len, intersect(used[rank], chunk))) for chunk in stored]

    def __call__(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the rows used here ``[used, ...]`` for the rows stored here ``[stored, ...]``; differentiable."""
        out = torch.cat([local[rows.start : rows.stop] for to_rank in self.sent for rows in to_rank] or [local[:0]])
        return exchange_rows(out, mesh, self.received, [sum(map(len, to_rank)) for to_rank in self.sent])


def exchange_rows(rows: Tensor, mesh: DeviceMesh, received: list[int], sent: list[int]) -> Tensor:
    """Exchange rows by all-to-all with the numbers from and to each rank; backward sends the gradients back."""
    if torch.compiler.is_compiling():
        return cast(Tensor, _ExchangeRows.apply(rows, mesh, received, sent))  # type: ignore[no-untyped-call]
    return cast(Tensor, _exchange_rows(rows, mesh, received, sent))


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: DeviceMesh, received: list[int], sent: list[int]) -> Tensor:
        ctx.mesh, ctx.received, ctx.sent = mesh, received, sent
        return all_to_all(rows, mesh, received, sent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradient, ctx.mesh, ctx.sent, ctx.received), None, None, None


_exchange_rows = direct(_ExchangeRows)


def all_to_all(rows: Tensor, mesh: DeviceMesh, received: Sequence[int], sent: Sequence[int]) -> Tensor:
    """Exchange rows as :func:`exchange_rows`, without a gradient."""
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    if not torch.compiler.is_compiling():
        dist.all_to_all_single(arrived, without_history(rows).contiguous(), received, sent, group=group_of(mesh))
        return arrived
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=mesh.get_group())
    # A view: torch 2.11's compiler gives no gradient to an autograd function with an output that was written in place.
    return arrived.view_as(arrived)
