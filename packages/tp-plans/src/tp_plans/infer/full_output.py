"""Gather the hidden states after the last block for readers of all tokens: pooling, a head, the caller of a trunk.

Between blocks, sequence parallelism shards them on the sequence.  A language-model head, and a linear layer with a
rule, read them in that layout.  Everything else gets the full tensor, plain, so that a replicated head computes its
full gradient on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from tp_plans.errors import CapabilityError
from tp_plans.infer.bytecode import first_argument
from tp_plans.layouts import Shard
from tp_plans.model_tree import ModelTree, ancestors, is_at_or_below, join, names_embedding, parent
from tp_plans.models.spec import SEQUENCE_DIM
from tp_plans.naming import leaf
from tp_plans.patterns import wildcard
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree
from tp_plans.styles import GatherSequence, PrepareModuleInput, SequenceParallel, Style


def is_read_in_full(tree: ModelTree) -> bool:
    """Return whether more than a language-model head reads the last hidden states, or the caller does."""
    # The classifiers that models of transformers share apply their one layer to every token before they pick any.
    if tree.lm_head is None and not any(base.__name__.startswith("GenericFor") for base in type(tree.model).__mro__):
        return True
    holders = (path for path in ancestors(tree.lm_head or "") if not is_at_or_below(tree.decoder or "", path))
    return any(_is_head(path, tree) for path in (*tree.after_decoder, *holders))  # a head may be defined first


def is_tied(path: str, tree: ModelTree) -> bool:
    """Return whether a layer shares its weight with a layer of another name, which may need another layout."""
    weight = join(path, "weight")
    return any(weight in group and len(set(map(wildcard, group))) > 1 for group in tree.tied)


def with_full_output(plan: Plan, tree: ModelTree) -> Plan:
    """Return a sequence-parallel plan that gathers the hidden states after the last block."""
    planned = PlannedTree(tree, plan)
    norm, last = norm_after_blocks(tree), tree.decoder_blocks[-1]
    if norm is not None and isinstance(style := planned.style(norm), SequenceParallel):
        return plan.override({planned.rule(norm) or norm: replace(style, full_output=True)})
    own = planned.style(last) or PrepareModuleInput(
        layout=Shard(SEQUENCE_DIM), argument=first_argument(tree.modules[last])
    )
    if norm is None and isinstance(own, PrepareModuleInput | GatherSequence):
        rule = planned.rule(last) or last
        shared = {path: own for path in planned.styles if planned.rule(path) == rule and path != last}
        removed: dict[str, Style | None] = {rule: None} if shared else {}
        return plan.override({**removed, **shared, last: replace(own, full_output=True)})
    raise CapabilityError(
        f"{type(tree.model).__name__} has a head or a caller that reads all tokens, and no norm after its last block "
        f"{last} to gather them: pass sequence_parallel=False"
    )


def norm_after_blocks(tree: ModelTree) -> str | None:
    """Return the norm of the last block's output: after the blocks, else the first norm next to them."""
    siblings = (path for path in tree.children[tree.root] if path != tree.decoder)
    norms = [path for path in siblings if tree.is_norm(path) and not names_embedding(path)]
    norms.sort(key=lambda path: "embed" in leaf(path))  # NeoMME's comes before its blocks, LFM2's only one after them
    return tree.final_norm or next(iter(norms), None)


def _is_head(path: str, tree: ModelTree) -> bool:
    """Return whether a module next to the language-model head, or above, is another head, with layers."""
    head = tree.lm_head
    if head is None or path == head or parent(path) not in ancestors(head):
        return False
    if is_at_or_below(path, tree.root) and not tree.is_linear(path):
        return False
    inside = {path, *tree.below(path)}
    with_stack = any(is_at_or_below(stack, path) for stack in tree.stacks)
    return not with_stack and any(module != head and tree.own_parameters(module) for module in inside)
