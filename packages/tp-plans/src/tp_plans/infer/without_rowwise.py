"""Plans without row-wise layers: results equal one process, bit for bit if the matrix products do."""

from __future__ import annotations

from dataclasses import replace

from tp_plans import styles
from tp_plans.errors import PlanError
from tp_plans.layouts import Partial
from tp_plans.plan import Plan, require_plan


def rowwise_free(plan: Plan) -> Plan:
    """Return the plan with every row-wise layer column-wise instead, so that no activation is a sum over ranks."""
    # A row-wise layer sums the ranks' products in another order than one process does. Here each rank gathers the
    # layer's input and computes some of its output features, each with one product over all input features, and the
    # features are gathered. Embeddings are looked up as before: all but one of the summed values are zero. The plan
    # sends more (a gather before and after each such layer) and costs no memory, except for replicated experts.
    # Source: the batch-invariant plans that NeMo RL's users write by hand for equal log-probabilities in training and
    # generation.
    require_plan(plan)
    changed = {pattern: _without_sum(pattern, style) for pattern, style in plan.items()}
    return Plan(changed, name=f"{plan.name}, rowwise-free", sequence_parallel=plan.sequence_parallel)


def _without_sum(pattern: str, style: styles.Style) -> styles.Style:
    match style:
        case (
            styles.RowwiseParallel(output_layouts=Partial())
            | styles.AllReduceOutput()
            | styles.ScaleInput()
            | styles.GatherSequence(inner=styles.AllReduceOutput())
        ):
            raise PlanError(
                f"the rule for {pattern!r} is {style}, and its output is a partial sum: to do without it, "
                "override the rules of the module that sums, so that it is replicated"
            )
        case styles.RowwiseParallel(fused_sizes=pieces) if pieces:
            raise PlanError(
                f"the rule for {pattern!r} reads {len(pieces)} pieces, which no gather puts in order: override it "
                "and the layer before it with NoParallel()"
            )
        case styles.RowwiseParallel():
            return styles.ColwiseParallel(
                input_layouts=style.input_layouts,
                output_layouts=style.output_layouts,
                use_local_output=style.use_local_output,
            )
        case styles.ExpertsParallel():
            return styles.NoParallel()
        case styles.GatherSequence(inner=styles.ExpertsParallel()):
            return replace(style, inner=None)
        case _:
            return style
