"""Floating-point operations of an operator, by torch's formulas, and formulas for operators that torch lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fsdp_runtime._torch_compat import storage_key, tree_leaves


def flops_of(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the operations of one call, a multiply-add counted as two; 0 for operators that only copy or add.

    Causal attention counts as full attention, as in ``torch.utils.flop_counter``.
    """
    packet = function.overloadpacket
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*_of_query_heads(*args[:3])))  # type: ignore[no-untyped-call]
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(args[0].shape, *_of_query_heads(*args[1:4])))  # type: ignore[no-untyped-call]
    if "grouped_mm" in str(packet) and getattr(args[0], "ndim", 0) == 2:
        products = 2 if "backward" in str(packet) else 1  # transformers' operator computes both gradients
        return 2 * products * int(args[0].numel() * args[1].shape[-1])
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def kind_of(function: Any) -> str:
    """Return the kind of an operator's operations: ``"attention"``, ``"grouped"`` or ``"matmul"``."""
    name = str(function.overloadpacket)
    return "attention" if "attention" in name else "grouped" if "grouped_mm" in name else "matmul"


def bytes_moved(args: Any, result: Any) -> int:
    """Return the bytes that an operator reads and writes at least, 0 for views."""
    read = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    known = {storage_key(leaf) for leaf in read}
    if all(storage_key(leaf) in known for leaf in written):
        return 0
    return sum(leaf.nbytes for leaf in (*read, *written))


def _of_query_heads(query: Tensor, key: Tensor, value: Tensor) -> list[torch.Size]:
    """Return the shapes with as many key/value heads as query heads: torch 2.10's formulas need them alike."""
    return [torch.Size((each.shape[0], query.shape[1], *each.shape[2:])) for each in (query, key, value)]
