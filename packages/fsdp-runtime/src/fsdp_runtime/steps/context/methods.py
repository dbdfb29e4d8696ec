"""The three methods of attention over ``cp``, and the limits of each."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.model.token_mixers import TokenMixer
from tp_plans import ColwiseParallel, Plan
from tp_plans.naming import FUSED_QKV, HEAD_COUNTS, MLA_HEADS, MLA_QUERIES, MLA_ROPE_DIM, QUERY

#: How queries reach the keys of other ranks, in the words of torch, DeepSpeed, and Liu et al.
Method = Literal["allgather", "ulysses", "ring"]


def require_plain_attention(path: str, *, eager: bool, dropout: float) -> None:
    """Check that a ring can compute an attention: no changed scores, and no dropout, since no rank has the weights."""
    if eager or dropout > 0:
        own = "a function of its own (attention implementation 'eager', as for sinks and soft caps)"
        raise ModelError(
            f"context_parallel='ring' computes softmax(q k) v, and {path} has "
            f"{own if eager else f'attention_dropout={dropout}'}: give 'ulysses' or 'allgather', set dropout to 0, or "
            "call model.set_attn_implementation('sdpa') if the model allows it"
        )


def require_heads(path: str, heads: int, cp: int, *, over_tp: str = "") -> None:
    """Check that the ranks of ``cp`` divide the query heads of a rank."""
    if heads % cp:
        raise ModelError(
            f"context_parallel='ulysses' divides heads over cp={cp}, and {path} has {heads} query heads on a "
            f"rank{over_tp}: choose a cp that divides {heads}, or give context_parallel='allgather' or 'ring'"
        )


def query_heads(structure: ModelStructure, mixer: TokenMixer) -> int | None:
    """Return the number of query heads of an attention module, ``None`` if it is unknown."""
    if hasattr(mixer.module, MLA_ROPE_DIM) and isinstance(heads := getattr(mixer.module, MLA_HEADS, None), int):
        return heads
    if (heads := structure.heads_below(mixer.path)) is not None:
        return heads.query
    owners = (mixer.module, getattr(mixer.module, "config", None))
    counts = (getattr(owner, name, None) for owner in owners for name in HEAD_COUNTS)
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def is_sharded(mixer: TokenMixer, plan: object) -> bool:
    """Return True if a plan divides the queries of a module."""
    if not isinstance(plan, Plan):
        return True
    names = dict.fromkeys((QUERY, *FUSED_QKV, *MLA_QUERIES))
    return any(
        isinstance(plan[pattern], ColwiseParallel) for name in names for pattern in plan.match(f"{mixer.path}.{name}")
    )


def attention_dropout(module: nn.Module) -> float:
    """Return the probability by which an attention drops weights."""
    dropout = getattr(module, "attention_dropout", getattr(getattr(module, "config", None), "attention_dropout", 0.0))
    return float(dropout) if isinstance(dropout, int | float) else 0.0
