"""Low-rank adapters of stacked experts, merged into the stacked weight as peft merges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fsdp_runtime.weights.adapters import LoraFactors


def merge_stacked_lora(
    weight: Tensor, factors: Sequence[LoraFactors], full: Mapping[str, Tensor], box: Sequence[slice] | None = None
) -> Tensor:
    """Return a stacked weight or a part of it plus its adapters, computed in float32 or a wider dtype.

    The outer products of the ranks are added one by one, so that a part has the bits of the full weight: the order in
    which a matrix product adds depends on its shape.

    Args:
        weight: ``[experts, out, in]`` (``[experts, in, out]`` if the factors are transposed), or a part of it.
        factors: its adapters.
        full: the full factors by name.
        box: the part, a slice for each dim; ``None`` for the full weight.

    Returns:
        The merged weight or part, in the weight's dtype.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)
    experts, rows, columns = (slice(None),) * 3 if box is None else box
    merged = weight.to(exact, copy=True)
    for each in factors:
        a, b = full[each.a_name].to(exact), full[each.b_name].to(exact)
        stacked = each.experts or 1
        a = a.view(stacked, -1, a.shape[-1])  # [experts, rank, in]
        b = b.view(b.shape[0], -1, stacked).permute(2, 0, 1)  # [experts, out, rank]: experts are innermost
        left, right = (a.transpose(1, 2), b.transpose(1, 2)) if each.transposed else (b, a)
        left, right = left[experts, rows], right[experts, :, columns]
        product = torch.zeros_like(merged)
        for rank in range(right.shape[1]):
            product += left[:, :, rank, None] * right[:, rank, None]
        merged.add_(product, alpha=each.scaling)
    return merged.to(weight.dtype)
