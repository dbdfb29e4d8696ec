"""Complete a plan: add rules for what it leaves replicated though it can be sharded with certainty.

Sub-layers whose parts are all known (attention in heads, multi-head latent attention, an MLP) are split as in
Megatron-LM (arXiv:1909.08053).  Of any other, a linear layer that reads full activations may still be stored sharded
and its output gathered, an embedding sharded on its vocabulary, a bare parameter gathered for use: right whatever the
module around it computes.
"""

from __future__ import annotations

from typing import Any

from tp_plans.infer.attention import per_head_norms, split_in_heads, with_replicated_kv_heads
from tp_plans.infer.stored_parameters import embedding_submodules, shard_storage
from tp_plans.infer.sublayers import split_sublayers
from tp_plans.infer.tied_modules import tied_modules
from tp_plans.model_tree import ModelTree
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree

#: Every step sees the rules that the steps before it have added.
STEPS = (
    split_sublayers,
    split_in_heads,
    per_head_norms,
    with_replicated_kv_heads,
    shard_storage,
    embedding_submodules,
    tied_modules,
)


def complete_plan(plan: Plan, model: Any, *, root: str = "") -> Plan:
    """Return the plan with attention sharded by heads and with rules for what it leaves replicated.

    Its own rules stay, but for the head sizes that they lack.  Nothing outside of ``root``, the language model, is
    added (a vision tower stays replicated).
    """
    tree = ModelTree.of(model)
    for step in STEPS:
        plan = plan.override(step(PlannedTree(tree, plan), root))
    return plan
