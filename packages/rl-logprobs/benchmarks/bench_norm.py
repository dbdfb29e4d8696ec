"""Norm and clip of 288 parameters over four ranks, ``dp_shard=2, tp=2``: rl-logprobs, torch and Automodel."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
from measure import command_line, run_ranks, table, take_turns
from peers import HOW, Clip, automodel, torch_clip
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rl_logprobs

COUNT = 288


def parameters(dtype: torch.dtype, mixed: bool) -> list[torch.Tensor]:
    """Large matrices and small vectors; ``mixed`` puts some on one axis of the mesh and some on none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    layouts = [(mesh, [Shard(0), Shard(1)]), (mesh, [Shard(0), Replicate()])]
    if mixed:
        layouts += [(mesh["dp_shard"], [Shard(0)]), (None, [])]
    torch.manual_seed(0)
    made = []
    for index in range(COUNT):
        where, placements = layouts[index % len(layouts)]
        gradient = torch.randn((512, 512) if index % 2 == 0 else (1024,)).to(dtype)
        if where is not None:
            gradient = distribute_tensor(gradient, where, placements, src_data_rank=None)
        zero = torch.zeros_like(gradient).requires_grad_()
        zero.grad = gradient
        made.append(zero)
    return made


def bench(dtype: torch.dtype, mixed: bool, order: float, rounds: int) -> None:
    made = parameters(dtype, mixed)
    local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in made if p.grad is not None]
    size = sum(gradient.nbytes for gradient in local)
    clips: dict[str, Clip] = {"rl_logprobs": rl_logprobs.clip_grad_norm_}
    if not mixed:
        clips["torch.nn.utils"] = torch_clip
    if (clip := automodel()) is not None:
        clips["NeMo Automodel"] = clip
    elif dist.get_rank() == 0:
        print(f"NeMo Automodel is left out; to have it: {HOW}")
    steps = {name: partial(function, made, 0.5, order) for name, function in clips.items()}
    before = [gradient.clone() for gradient in local]

    def restore() -> None:
        torch._foreach_copy_(local, before)

    results = take_turns(steps, lambda: [*local, *before], rounds, restore)
    where = "mixed meshes (torch raises)" if mixed else "one mesh"
    name = "infinity" if math.isinf(order) else f"{order:g}"
    title = f"clip by the {name}-norm, {COUNT} parameters, {where}, {str(dtype)[6:]}"
    table(title, results, size, "gradients")
    restore()
    full = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in made]
    exact = torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in full if g is not None]), order)
    for name, step in steps.items():
        restore()
        found = step()
        found = found.full_tensor() if isinstance(found, DTensor) else found
        if dist.get_rank() == 0:
            print(f"  {name:34} relative error {abs(found.double() / exact - 1).item():.1e}")


def main() -> None:
    chosen = command_line(__doc__, rounds=15)
    for dtype in chosen.dtype:
        for mixed in (False, True):
            for order in (2.0, math.inf):
                run_ranks(4, bench, dtype, mixed, order, chosen.rounds)


if __name__ == "__main__":
    main()
