"""What a plan leaves whole though it can be split with certainty: found by structure, and added to the plan.

Sub-layers whose parts are all known (attention in heads, multi-head latent attention, a gated MLP) are split as
Megatron-LM does.  Of any other, a linear layer that reads whole activations may still be stored split and its
output gathered, an embedding split on its vocabulary, a bare parameter gathered for use: right whatever the
module around it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tp_plans.completion.heads import in_whole_heads, norms_of_every_head, with_shared_heads
from tp_plans.completion.leftovers import inside_tables, stored_split
from tp_plans.completion.sublayers import split_sublayers
from tp_plans.completion.tree import Tree
from tp_plans.plan import Plan

__all__ = ["completed"]

STEPS = (split_sublayers, in_whole_heads, norms_of_every_head, with_shared_heads, stored_split, inside_tables)


def completed(plan: Plan, modules: Mapping[str, Any], *, root: str = "") -> Plan:
    """The plan with attention split in whole heads, and with rules for what it leaves whole.

    Args:
        plan: the plan; what its rules say stays.
        modules: path to module of the model that it is for, as ``dict(model.named_modules())``.
        root: where the language model sits in it; nothing outside is added (a vision tower stays whole).
    """
    for step in STEPS:
        plan = plan.override(step(Tree(plan, modules, root)))
    return plan
