"""The styles of a low-rank adapter's two factors, by the style of its layer.

An adapter adds ``B(A(x))`` to a layer's output, with ``A`` ``[rank, in]`` and ``B`` ``[out, rank]`` (arXiv:2106.09685).
Beside a column-wise layer ``B`` is sharded like the layer and ``A`` is replicated.  Beside a row-wise layer ``A`` is
sharded like the layer and ``B`` is replicated, after the sum over the ranks, which is cheap at the width of the rank.
Source of the layouts: S-LoRA (arXiv:2311.03285), section 6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tp_plans import styles
from tp_plans.errors import PlanError
from tp_plans.layouts import Partial, Replicate, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStyles:
    """The styles of an adapter's two factors."""

    a: styles.Style  # of lora_A, from the layer's input to the rank
    b: styles.Style  # of lora_B, from the rank to the layer's output


def adapter_styles(style: styles.Style, *, sequence_dim: int | None = None) -> AdapterStyles:
    """Return the styles of the factors of an adapter on a layer of this style, with numbers for attribute names."""
    # ``sequence_dim`` is the sharded dim of the layer's input, if no module above gathers it (the head under sequence
    # parallelism).
    match style:
        case styles.ColwiseParallel() | styles.MLAKVProjection():
            a = styles.NoParallel() if sequence_dim is None else styles.SequenceParallel(sequence_dim=sequence_dim)
            return AdapterStyles(a=a, b=style)
        case styles.RowwiseParallel(output_layouts=Shard(dim=-1)):  # each rank keeps its features of the sum
            return AdapterStyles(
                a=replace(style, output_layouts=Replicate(), use_local_output=True), b=styles.ColwiseParallel()
            )
        case styles.RowwiseParallel(output_layouts=output) if output != Partial():
            is_full = output == Replicate()
            return AdapterStyles(a=style, b=styles.NoParallel(gradient="full" if is_full else "partial"))
        case styles.NoParallel():
            return AdapterStyles(a=style, b=style)
        case styles.GatheredParameters() if sequence_dim is None:  # every rank computes the full layer
            return AdapterStyles(a=styles.NoParallel(), b=styles.NoParallel())
    raise PlanError(
        f"a layer that is {style} cannot carry a low-rank adapter: leave it out of the adapter's target modules, or "
        "give it a rule ColwiseParallel, RowwiseParallel, MLAKVProjection or NoParallel"
    )
