"""Bytes that a rank sends to bring tokens to their experts and back, beside transformers' expert parallelism.

Both run on one rank of a fake world of ``--ranks``, with the same hidden states and a router that chooses any experts
equally often; every other rank is taken to send as this one gets.  What is counted is what ``all_to_all_single`` is
given, in forward and backward, without the part that stays on the rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.distributed.expert_parallel import AllToAllEP

from fsdp_runtime.dry_run.trace.assumed_values import mean_destinations
from tp_plans.runtime import AllToAllExchange


class CountSent(TorchDispatchMode):
    """Counts the bytes of all-to-alls that leave this rank, the first of the group."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional") and name in ("alltoall_base_", "all_to_all_single"):
            values, parts = (args[1], args[4]) if name == "alltoall_base_" else (args[0], args[2])
            own = parts[0] * values[:1].nbytes if parts else values.nbytes // dist.get_world_size()
            self.sent += values.nbytes - own
            self.calls += 1
        return func(*args, **(kwargs or {}))


class Counted(AllToAllExchange):
    """The exchange where what comes from each other rank is what this rank sends there."""

    def read_counts(self, sent: Tensor, received: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
        received.copy_(sent)
        return super().read_counts(sent, received)


def ours(mesh: DeviceMesh, hidden: Tensor, index: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Dispatch, experts that return their input, combine."""
    exchange = Counted(mesh)
    dispatched = exchange.dispatch(hidden, index, weights, experts=experts)
    return exchange.combine(dispatched.rows, dispatched)


def theirs(mesh: DeviceMesh, hidden: Tensor, index: Tensor, weights: Tensor, experts: int) -> Tensor:
    """The same by transformers."""

    class Same(nn.Module):
        num_experts = experts // mesh.size()

        def forward(self, rows: Tensor, *_: Any) -> Tensor:
            return rows

    def mirrored(received: Tensor, sent: Tensor, **options: Any) -> None:
        dist.all_to_all_single(received, sent, **options)
        received.copy_(sent)

    single = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("other", "tp"))["tp"]
    with patch("transformers.distributed.expert_parallel.all_to_all_single", mirrored):
        return AllToAllEP(Same(), mesh, single)(hidden, index, weights)


def sent_by(exchange: Callable[..., Tensor], *arguments: Any) -> CountSent:
    """Count what a forward and a backward send."""
    with CountSent() as count:
        exchange(*arguments).sum().backward()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2048)
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(options.tokens, options.experts)
    weights, index = scores.softmax(-1).topk(options.top_k)
    weights = weights.to(torch.bfloat16).requires_grad_()
    found = {
        name: sent_by(exchange, mesh, hidden, index, weights, options.experts)
        for name, exchange in {"transformers": theirs, "once for each rank": ours}.items()
    }
    print(f"{options.tokens} tokens, top-{options.top_k} of {options.experts} experts on {options.ranks} ranks, bf16")
    print(f"  {'':20} {'MiB sent':>9} {'all-to-alls':>12} {'ratio':>6}; to hold: 0.75")
    for name, count in found.items():
        ratio = count.sent / found["transformers"].sent
        print(f"  {name:20} {count.sent / 2**20:9.1f} {count.calls:12} {ratio:6.3f}")
    expected = mean_destinations(options.experts, options.top_k, options.ranks) / options.top_k
    print(f"  rows alone, in closed form: {expected:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
