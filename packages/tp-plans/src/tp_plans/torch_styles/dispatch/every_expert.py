"""The exchange of experts that all get every token: ``[experts, tokens, hidden]``, each rank's experts to that rank."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tp_plans.torch_styles.dispatch.exchange import TokenExchange


def to_experts(exchange: TokenExchange, tokens: Tensor) -> tuple[Tensor, list[int]]:
    """Send every expert's tokens to its rank.

    Args:
        exchange: how tokens travel; it reads the numbers of tokens.
        tokens: ``[experts, tokens, hidden]``; the number of tokens may differ from rank to rank.

    Returns:
        ``[own experts, tokens of all ranks, hidden]``, and the number of tokens of each rank.
    """
    mesh = exchange.mesh
    counts = torch.tensor([tokens.shape[1]], device=tokens.device)
    gathered = counts.new_empty(mesh.size())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(gathered, counts, group=mesh.get_group())
    sizes = exchange.read_sizes(gathered, tokens.shape[1])
    return cast(Tensor, _ToExperts.apply(mesh, tokens, sizes)), sizes  # type: ignore[no-untyped-call]


def from_experts(mesh: DeviceMesh, outputs: Tensor, sizes: list[int]) -> Tensor:
    """Send the results ``[own experts, tokens of all ranks, hidden]`` back: ``[experts, tokens, hidden]``."""
    return cast(Tensor, _FromExperts.apply(mesh, outputs, sizes))  # type: ignore[no-untyped-call]


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, tokens: Tensor, sizes: list[int]) -> Tensor:
        ctx.mesh, ctx.sizes = mesh, sizes
        return _to_experts(mesh, tokens, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, _from_experts(ctx.mesh, gradient, ctx.sizes), None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, outputs: Tensor, sizes: list[int]) -> Tensor:
        ctx.mesh, ctx.sizes = mesh, sizes
        return _from_experts(mesh, outputs, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, _to_experts(ctx.mesh, gradient, ctx.sizes), None


def _to_experts(mesh: DeviceMesh, tokens: Tensor, sizes: list[int]) -> Tensor:
    experts, number, hidden = tokens.shape
    own = experts // mesh.size()
    received = [own * size for size in sizes]
    arrived = tokens.new_empty(sum(received), hidden)
    sent = [own * number] * mesh.size()
    dist.all_to_all_single(arrived, tokens.reshape(-1, hidden).contiguous(), received, sent, group=mesh.get_group())
    return torch.cat([part.view(own, len(part) // own, hidden) for part in torch.split(arrived, received)], dim=1)


def _from_experts(mesh: DeviceMesh, outputs: Tensor, sizes: list[int]) -> Tensor:
    own, _, hidden = outputs.shape
    number = sizes[mesh.get_local_rank()]
    sent = torch.cat([part.reshape(-1, hidden) for part in torch.split(outputs, sizes, dim=1)])
    arrived = outputs.new_empty(mesh.size() * own * number, hidden)
    received = [own * number] * mesh.size()
    dist.all_to_all_single(arrived, sent, received, [own * size for size in sizes], group=mesh.get_group())
    return arrived.view(mesh.size() * own, number, hidden)
