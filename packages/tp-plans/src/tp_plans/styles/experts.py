"""Mixtures of experts, and modules with partial sums as outputs."""

from __future__ import annotations

from dataclasses import dataclass

from tp_plans.layouts import Layout, Replicate
from tp_plans.styles.fields import require_flag, require_layout


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
class DispatchExperts:
    """The experts of a mixture, stacked in parameters ``[experts, ...]``, on the axis ``ep``: tokens go to experts.

    The one style of the axis ``ep``; all others are of the axis ``tp``.  Each rank of ``ep`` holds
    ``experts / ep`` experts and brings its own tokens.  A token is sent once to every rank that has some of its
    experts, with their numbers and routing weights, and comes back as one sum.  Other parameters of the module, such as
    a norm of the experts' outputs, are replicated and their gradients summed.  Routers and shared experts are other
    modules and keep the rules of the axis ``tp``.

    The module's forward takes ``(hidden_states, top_k_index, top_k_weights)`` with global expert numbers, as in
    transformers 5.  Where it takes ``hidden_states`` alone, they are ``[experts * tokens, hidden]``, every expert's in
    turn (Llama 4), and each expert gets all tokens.

    Args:
        identity_indices: whether an index from the number of experts on stands for an expert that returns its input
            (LongCat), rather than for none.
    """

    identity_indices: bool = False

    def __post_init__(self) -> None:
        require_flag(self, "identity_indices")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleInput:
    """A module without parameters inside split experts.  Every rank adds its output: the input is divided by ``tp``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceOutput:
    """A module with split parameters and a partial sum as output: the ranks' outputs are summed.

    The gradients of its input are partial sums too, and are summed.

    Args:
        output_layouts: layout of the output: ``Replicate()``, or ``Shard(dim)`` to reduce-scatter onto a dim.
    """

    output_layouts: Layout = Replicate()

    def __post_init__(self) -> None:
        require_layout(self, "output_layouts")
