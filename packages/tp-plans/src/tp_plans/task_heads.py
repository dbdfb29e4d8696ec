"""The heads that transformers puts on a decoder for other tasks than generating text."""

from __future__ import annotations

from tp_plans.layouts import Replicate
from tp_plans.plan import Plan
from tp_plans.styles import RowwiseParallel, Style

#: By task: the head's name, and its style.  Row-wise, since labels are few; it reads activations in any layout, full
#: or sharded on the sequence, and outputs full plain scores.
TASK_HEADS: dict[str, tuple[str, Style]] = {
    "ForSequenceClassification": ("score", RowwiseParallel(input_layouts=Replicate())),
    "ForTokenClassification": ("score", RowwiseParallel(input_layouts=Replicate())),
}


def with_task_head(plan: Plan, head: str, task: str, *, name: str) -> Plan:
    """The plan with the rule of ``head`` replaced by the rule of a task's head."""
    path, style = TASK_HEADS[task]
    without: dict[str, Style | None] = {head: None} if head in plan else {}
    changed = plan.override({**without, path: style})
    return Plan(changed, name=name, sequence_parallel=plan.sequence_parallel)
