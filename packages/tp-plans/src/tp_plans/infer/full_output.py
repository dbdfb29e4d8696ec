"""Gather the hidden states after the last block for whatever reads all tokens: pooling, a head, the caller of a trunk.

Between blocks, sequence parallelism shards them on the sequence.  A language-model head, and a linear layer with a rule,
read them in that layout.  Everything else gets the full tensor, plain, so that a replicated head computes its full
gradient on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from tp_plans.errors import CapabilityError
from tp_plans.infer.bytecode import first_argument
from tp_plans.layouts import Shard
from tp_plans.model_tree import ModelTree, ancestors, is_at_or_below, parent
from tp_plans.models.spec import SEQUENCE_DIM
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree
from tp_plans.styles import PrepareModuleInput, SequenceParallel


def is_read_in_full(tree: ModelTree) -> bool:
    """Return whether the hidden states after the last block are read by more than linear layers, or by the caller."""
    if any(_is_head(path, tree) for path in tree.after_decoder):
        return True
    return tree.lm_head is None and not any(tree.is_linear(path) for path in tree.reads_decoder_output)


def with_full_output(plan: Plan, tree: ModelTree) -> Plan:
    """Return a sequence-parallel plan whose hidden states are gathered after the last block.

    Args:
        plan: the plan of the model.
        tree: the model.

    Raises:
        CapabilityError: the plan does not say where they can be gathered.
    """
    planned = PlannedTree(tree, plan)
    norm, last = tree.final_norm, tree.decoder_blocks[-1]
    if norm is not None and isinstance(style := planned.style(norm), SequenceParallel):
        return plan.override({planned.rule(norm) or norm: replace(style, full_output=True)})
    if norm is None and planned.rule(last) in (None, last):
        prepared = planned.style(last) or PrepareModuleInput(
            layout=Shard(SEQUENCE_DIM), argument=first_argument(tree.modules[last])
        )
        if isinstance(prepared, PrepareModuleInput):
            return plan.override({last: replace(prepared, full_output=True)})
    raise CapabilityError(
        f"{type(tree.model).__name__} has a head or a caller that reads all tokens, and no norm after its last block "
        f"{last} at which the plan gathers them: pass sequence_parallel=False"
    )


def _is_head(path: str, tree: ModelTree) -> bool:
    """Return whether a module outside the trunk, next to the language-model head or above, has layers of its own."""
    head = tree.lm_head
    if is_at_or_below(path, tree.root) or path == head or tree.is_linear(path):
        return False
    if head is not None and parent(path) not in ancestors(head):
        return False
    inside = {path, *tree.below(path)}
    with_stack = any(is_at_or_below(stack, path) for stack in tree.stacks)
    return not with_stack and any(each != head and tree.own_parameters(each) for each in inside)
