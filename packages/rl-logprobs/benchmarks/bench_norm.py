"""Norm and clip of 288 parameters over four ranks, ``dp_shard=2, tp=2``: ours beside torch's where it works."""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed as dist
from measure import run_ranks, table, take_turns
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import rl_logprobs

COUNT = 288


def parameters(dtype: torch.dtype, mixed: bool) -> list[torch.Tensor]:
    """Large matrices and small vectors; ``mixed`` puts some on one axis of the mesh and some on none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    layouts = [(mesh, [Shard(0), Shard(1)]), (mesh, [Shard(0), Replicate()])]
    if mixed:
        layouts += [(mesh["dp_shard"], [Shard(0)]), (None, [])]
    torch.manual_seed(dist.get_rank())
    made = []
    for index in range(COUNT):
        where, placements = layouts[index % len(layouts)]
        shape = (256, 256) if index % 2 == 0 else (512,)
        gradient = torch.randn(shape).to(dtype)
        zero = torch.zeros_like(gradient)
        if where is not None:
            gradient, zero = (DTensor.from_local(x, where, placements) for x in (gradient, zero))
        zero.requires_grad_()
        zero.grad = gradient
        made.append(zero)
    return made


def bench(dtype: torch.dtype, mixed: bool, order: float, rounds: int) -> None:
    made = parameters(dtype, mixed)
    local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in made]
    size = sum(gradient.nbytes for gradient in local if gradient is not None)
    # A bound that is never reached: the gradients are scaled all the same, by one, and keep their size.
    steps = {"rl_logprobs": lambda: rl_logprobs.clip_grad_norm_(made, 1e9, order)}
    if not mixed:
        steps["torch.nn.utils"] = lambda: torch.nn.utils.clip_grad_norm_(made, 1e9, order)
    results = take_turns(steps, lambda: [g for g in local if g is not None], rounds)
    where = "mixed meshes (torch raises)" if mixed else "one mesh"
    name = "infinity" if math.isinf(order) else f"{order:g}"
    title = f"clip by the {name}-norm, {COUNT} parameters, {where}, {str(dtype)[6:]}"
    table(title, results, ("rl_logprobs",), size, "gradients")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for dtype in options.dtype:
        for mixed in (False, True):
            for order in (2.0, math.inf):
                run_ranks(4, bench, getattr(torch, dtype), mixed, order, options.rounds)


if __name__ == "__main__":
    main()
