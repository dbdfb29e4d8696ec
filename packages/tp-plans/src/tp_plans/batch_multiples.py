"""What the sizes of a batch must be multiples of under a plan."""

from __future__ import annotations

from dataclasses import dataclass

from tp_plans._validate import require_size
from tp_plans.layouts import Shard
from tp_plans.plan import Plan, require_plan
from tp_plans.styles import ColwiseEmbedding, RowwiseParallel, VocabParallelEmbedding


@dataclass(frozen=True)
class BatchDivisibility:
    """What ``[batch, seq, hidden]`` must divide by, and why."""

    batch: int
    sequence: int
    reason: str


def batch_divisibility(plan: Plan, *, tp: int) -> BatchDivisibility:
    """What batch size and sequence length must be multiples of; 1 where any will do.

    Args:
        plan: the plan.
        tp: the size of the tensor-parallel axis.

    Returns:
        1 and 1 for every plan of this package: a cut stream stays a DTensor, which knows its full length, so
        ranks may hold parts of different length.  ``tp`` for a dim that some rule of the plan hands on as a plain
        part, since nothing tells such parts' full length.

    Raises:
        PlanError: ``plan`` is no plan, or ``tp`` no size.

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
        reason = f"{', '.join(patterns)} hand on plain parts, of which nothing tells the full length"
    elif plan.sequence_parallel:
        reason = "the cut stream is a DTensor, which knows its full length: parts may differ in length"
    else:
        reason = "the plan cuts neither batch nor sequence"
    return BatchDivisibility(batch, sequence, reason)
