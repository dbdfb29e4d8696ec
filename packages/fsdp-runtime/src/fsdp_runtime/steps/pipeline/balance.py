"""Divide blocks by the operations of a token and by bytes, embedding and head included."""

from __future__ import annotations

from contextlib import suppress

from torch import nn

from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.steps.pipeline.split import split_blocks
from fsdp_runtime.steps.routing.routers import routers_of


def balanced(structure: ModelStructure, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage."""
    modules, shares = structure.tree.modules, dict[str, float]()
    with suppress(ModelError):  # a mixture of unknown form, such as JetMoE's attention: all of its experts are counted
        routers = routers_of(structure).by_path.values()
        shares = {f"{router.experts_path}.": router.share for router in routers if router.share}
    blocks, head = structure.decoder, structure.lm_head
    inside = tuple(f"{path}." for path in blocks)
    outside = [path for path in (structure.embedding, head) if path is not None and not path.startswith(inside)]
    flops = {path: _flops(modules[path], path, shares) for path in (*blocks, *outside)}
    sizes = {path: float(sum(p.nbytes for p in modules[path].parameters())) for path in (*blocks, *outside)}
    first, last = structure.embedding, head
    return split_blocks(
        [flops[path] for path in blocks],
        stages,
        after=flops.get(last or "", 0),
        sizes=[sizes[path] for path in blocks],
        size_before=sizes.get(first or "", 0),
        size_after=sizes.get(last or "", 0),
    )


def _flops(module: nn.Module, path: str, shares: dict[str, float]) -> float:
    """Return the products with weights for one token, in forwards: a trained weight takes three, a frozen one two."""
    # ``shares`` has the part of the experts that a token uses, by the prefix of their parameters.
    total = 0.0
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2:
            place = f"{path}.{name}"
            share = next((share for prefix, share in shares.items() if place.startswith(prefix)), 1.0)
            total += (3 if parameter.requires_grad else 2) * parameter.numel() * share
    return total
