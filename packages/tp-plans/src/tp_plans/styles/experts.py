"""Mixtures of experts, and modules whose outputs are partial sums."""

from __future__ import annotations

from dataclasses import dataclass

from tp_plans._validate import (
    require_flag,
    require_layout,
)
from tp_plans.layouts import Layout, Replicate


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsParallel:
    """The experts of a mixture, stacked in parameters ``[experts, ...]``: each rank holds and runs some of them.

    Every rank has every token, runs those routed to its own experts, and the ranks' outputs are summed.  Whatever
    a parameter's other dims mean (fused gate and up, transposed, a bias) is replicated.

    The module's forward takes ``(hidden_states, top_k_index, top_k_weights)``; an index equal to its
    ``num_experts`` stands for an expert of another rank, as in transformers 5.  Where a forward takes
    ``hidden_states`` alone, they are ``[experts * tokens, hidden]``, every expert's in turn (Llama 4).

    Args:
        output_layouts: layout of the output: ``Replicate()``, or ``Shard(dim)`` to reduce-scatter onto a dim.
        skips_sentinel_index: whether the forward passes over that index.  Where it does not, routes to other ranks'
            experts run on one of this rank's with weight zero: right, and work for nothing.
    """

    output_layouts: Layout = Replicate()
    skips_sentinel_index: bool = True

    def __post_init__(self) -> None:
        require_layout(self, "output_layouts")
        require_flag(self, "skips_sentinel_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleInput:
    """A module without parameters inside split experts, whose output every rank would add: input over ``tp``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceOutput:
    """A module whose output is a partial sum, since its parameters are split: the ranks' outputs are summed.

    The gradients of its input are partial sums too, and are summed.

    Args:
        output_layouts: layout of the output: ``Replicate()``, or ``Shard(dim)`` to reduce-scatter onto a dim.
    """

    output_layouts: Layout = Replicate()

    def __post_init__(self) -> None:
        require_layout(self, "output_layouts")
