"""What a dry run takes for results that depend on data: the one place where values are assumed.

Tokens are spread evenly over experts, and checks pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: What models call their number of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")

aten = torch.ops.aten

#: Operators that a dry run answers itself.
DATA_DEPENDENT = frozenset({aten._local_scalar_dense.default, aten.nonzero.default})

#: Grouped products, which CPUs and GPUs run in every dtype, and fake tensors in bfloat16 only (torch 2.10 to 2.15).
GROUPED = frozenset({aten._grouped_mm.default})

_CHECKS = frozenset({"all", "equal", "is_same_size", "allclose"})
_COUNTS = frozenset({"histc", "bincount"})
_ORIGIN = "_fsdp_runtime_origin"


def remember_origin(function: Any, args: Any, result: Any) -> None:
    """Note which operator made a single truth value or a table of counts, for :func:`substitute`."""
    if isinstance(result, Tensor) and ((result.dtype == torch.bool and result.ndim == 0) or _name(function) in _COUNTS):
        setattr(result, _ORIGIN, (_name(function), args[0].numel() if isinstance(args[0], Tensor) else 0))


def substitute(function: Any, tensor: Tensor, running: Sequence[nn.Module]) -> tuple[Any, str]:
    """The result of an operator of ``DATA_DEPENDENT``, and in words what was assumed.

    Args:
        function: the operator.
        tensor: what it is applied to.
        running: the modules that run, outermost first.
    """
    if function is aten.nonzero.default:
        rows = _selected(tensor, experts_of(running))
        told = f"{rows} of {tensor.numel()} elements are selected: tokens are spread evenly over experts"
        return tensor.new_empty((rows, tensor.ndim), dtype=torch.int64), told
    name, elements = getattr(tensor, _ORIGIN, ("", 0))
    if tensor.dtype == torch.bool:
        passes = name in _CHECKS
        return passes, "a check of values passes" if passes else "a condition on values is false"
    if tensor.dtype.is_floating_point:
        return 1.0, "a value is 1.0"
    if name in _COUNTS and elements:
        each = elements // max(1, tensor.numel())
        return each, f"a count is {each}: tokens are spread evenly over experts"
    return 0, "an index is 0"


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """What a grouped product returns: a row for each of the left's, or a matrix for each group."""
    if left.ndim == 2 and right.ndim == 2 and offsets is not None:
        return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def experts_of(running: Sequence[nn.Module]) -> int | None:
    """The number of experts of the innermost module that says one."""
    for module in reversed(running):
        for name in _EXPERTS:
            if isinstance(count := getattr(module, name, None), int) and count > 0:
                return count
    return None


def _selected(tensor: Tensor, experts: int | None) -> int:
    """Of a mask over experts every expert, of one over tokens an even share."""
    if experts is None:
        return tensor.numel()
    if tensor.numel() in (experts, experts + 1):  # some models count an expert for tokens that have none
        return experts
    return -(-tensor.numel() // experts)


def _name(function: Any) -> str:
    return str(function.name()).split("::")[1].split(".")[0].rstrip("_")
