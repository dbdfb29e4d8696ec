"""Heads for sequence by all-to-all: each rank attends with some of the heads over the full sequence.

Before attention each rank gets all tokens of its heads, and after it the tokens return (DeepSpeed-Ulysses, Jacobs et
al., arXiv:2309.14509).  So a rank computes attention as without ``cp``, for fewer heads, by any function
and with any mask.  If ``cp`` does not divide the key and value heads, they are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import lcm
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_runtime.steps.context.exchange import heads_to_tokens, tokens_to_heads
from fsdp_runtime.steps.context.methods import require_heads
from fsdp_runtime.steps.context.sharding import SequenceLayout
from tp_plans.naming import KV_GROUPS


def attend_over_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout,
    group: ProcessGroup,
) -> Tensor:
    """Compute attention with this rank's heads over the full sequence."""
    # Tensors are ``[batch, heads, seq / cp, *]``, for ``attend`` ``[batch, heads / cp, seq, *]``.
    require_heads("the attention", query.shape[1], layout.ranks)
    copies = kv_copies(key.shape[1], layout.ranks)
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    full = tokens_to_heads([query, key, value], layout, group, heads_dim=1, tokens_dim=2)
    return heads_to_tokens(attend(*full), layout, group, heads_dim=1, tokens_dim=2)


def kv_copies(heads: int, ranks: int) -> int:
    """Return the copies per key and value head that let the ranks divide them: 1 if ``ranks`` divides ``heads``."""
    return lcm(heads, ranks) // heads


class OwnHeads:
    """An attention module with one rank's heads, for its attention function."""

    def __init__(self, module: nn.Module, heads: int, own: slice, kv_heads: int) -> None:
        self._module, self._heads, self._own = module, heads, own
        self._groups = (own.stop - own.start) // kv_heads

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute; this rank's part of a parameter with an entry per head (sinks)."""
        return self._groups if name == KV_GROUPS else self.of(getattr(self._module, name))

    def of(self, value: Any) -> Any:
        """Return a value; this rank's entries of a tensor with one entry per head and no other dim."""
        if not isinstance(value, Tensor) or value.numel() != self._heads or self._heads not in value.shape:
            return value
        return value.narrow(list(value.shape).index(self._heads), self._own.start, self._own.stop - self._own.start)

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords of an attention function with this rank's heads."""
        return {name: self.of(value) for name, value in options.items()}
