"""Assume results for data-dependent operators: tokens spread evenly over experts, checks pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime._torch_compat import operator_name
from tp_plans.naming import EXPERT_COUNTS

aten = torch.ops.aten

#: Operators with results that a dry run assumes.
DATA_DEPENDENT = frozenset({aten._local_scalar_dense.default, aten.nonzero.default})

#: Grouped matrix products: CPUs and GPUs run them in every dtype, fake tensors only in bfloat16 (torch 2.11 to 2.15).
GROUPED_MM = frozenset({aten._grouped_mm.default})

_CHECKS = frozenset({"all", "is_all_true", "_is_all_true", "equal", "is_same_size", "allclose"})
_COUNTS = frozenset({"histc", "bincount"})
_ORIGIN = "_fsdp_runtime_origin"


def remember_origin(function: Any, args: Any, result: Any) -> None:
    """Attach to a boolean scalar or a table of counts the operator that made it, for :func:`assume_result`."""
    if not isinstance(result, Tensor):
        return
    name = operator_name(function).rstrip("_")
    if (result.dtype == torch.bool and result.ndim == 0) or name in _COUNTS:
        setattr(result, _ORIGIN, (name, args[0].numel() if isinstance(args[0], Tensor) else 0))


def assume_result(function: Any, tensor: Tensor, running: Sequence[nn.Module]) -> tuple[Any, str]:
    """Return an assumed result of an operator of ``DATA_DEPENDENT`` on a tensor, and the assumption in words."""
    # ``running`` are the running modules, outermost first.
    if function is aten.nonzero.default:
        rows = _selected(tensor, num_experts_of(running))
        assumption = (
            f"{rows} of {tensor.numel()} elements are selected: tokens are spread evenly over experts. "
            "A rank needs more memory where its experts get more tokens"
        )
        return tensor.new_empty((rows, tensor.ndim), dtype=torch.int64), assumption
    name, elements = getattr(tensor, _ORIGIN, ("", 0))
    if tensor.dtype == torch.bool:
        passes = name in _CHECKS
        if passes:
            return True, "a check of values passes, as in every run without an error; no number depends on it"
        return False, "a condition on values is false; if it is true in a run, other code runs than was counted"
    if tensor.dtype.is_floating_point:
        return 1.0, "a value that the code reads is 1.0; numbers depend on it only where sizes do"
    if name in _COUNTS and elements:
        each = elements // max(1, tensor.numel())
        return each, f"a count is {each}: tokens are spread evenly over experts"
    return 0, "an index that the code reads is 0; numbers depend on it only where sizes do"


def grouped_mm(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the empty result of a grouped matrix product: one row per row of ``left``, or one matrix per group."""
    if left.ndim == 2 and right.ndim == 2 and offsets is not None:
        return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def num_experts_of(running: Sequence[nn.Module]) -> int | None:
    """Return the number of experts of the innermost module that has one."""
    for module in reversed(running):
        for name in EXPERT_COUNTS:
            if isinstance(count := getattr(module, name, None), int) and count > 0:
                return count
    return None


def _selected(tensor: Tensor, experts: int | None) -> int:
    """Return the selected elements of a mask: every expert, or an even share of tokens."""
    if experts is None:
        return tensor.numel()
    if tensor.numel() in (experts, experts + 1):  # some models count an expert for tokens without experts
        return experts
    return -(-tensor.numel() // experts)
