"""The divisors of batch size and sequence length that a plan requires."""

from __future__ import annotations

from dataclasses import dataclass

from tp_plans._validate import require_size
from tp_plans.layouts import Shard
from tp_plans.plan import Plan, require_plan
from tp_plans.styles import ColwiseEmbedding, RowwiseParallel, VocabParallelEmbedding


@dataclass(frozen=True)
class BatchDivisibility:
    """The required divisors of ``[batch, seq, hidden]``, and the reason."""

    batch: int
    sequence: int
    reason: str


def batch_divisibility(plan: Plan, *, tp: int) -> BatchDivisibility:
    """Return the required divisors of batch size and sequence length; 1 where any size is valid.

    Args:
        plan: the plan.
        tp: the size of the tensor-parallel axis.

    Returns:
        1 and 1 for every plan of this package: sharded activations stay DTensors, which know their full length, so
        local shards may differ in length.  ``tp`` for a dim that some rule outputs as a plain local shard, since such
        shards do not carry the full length.

    Raises:
        PlanError: ``plan`` is not a plan, or ``tp`` not a size.

    Example:
        >>> import tp_plans
        >>> tp_plans.batch_divisibility(tp_plans.plan_for("LlamaForCausalLM"), tp=8).batch
        1
    """
    require_plan(plan)
    require_size(tp)
    plain: dict[int, list[str]] = {0: [], 1: []}
    for pattern, style in plan.items():
        if isinstance(style, (RowwiseParallel, VocabParallelEmbedding, ColwiseEmbedding)):
            cut = style.output_layouts
            if isinstance(cut, Shard) and cut.dim in plain and style.use_local_output:
                plain[cut.dim].append(pattern)
    batch, sequence = (tp if plain[dim] else 1 for dim in (0, 1))
    if patterns := plain[0] + plain[1]:
        reason = f"{', '.join(patterns)} output plain local shards, which do not carry the full length"
    elif plan.sequence_parallel:
        reason = "sharded activations are DTensors, which know their full length: local shards may differ in length"
    else:
        reason = "the plan cuts neither batch nor sequence"
    return BatchDivisibility(batch, sequence, reason)
