"""Complete a plan: add rules for replicated parameters that can be sharded with certainty.

Sub-layers with known parts only (attention in heads, latent attention, an MLP) are split as in Megatron-LM
(arXiv:1909.08053).  Three rules are right for any code: a linear layer that reads full activations is stored sharded
and its output gathered, an embedding is sharded on its vocabulary, a bare parameter is gathered for use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tp_plans.errors import PlanError
from tp_plans.infer.attention import per_head_norms, split_in_heads, with_replicated_kv_heads
from tp_plans.infer.stored_parameters import embedding_submodules, shard_storage
from tp_plans.infer.sublayers import split_sublayers
from tp_plans.model_tree import ModelTree, ancestors, is_at_or_below, join, parent
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree, merge_per_block
from tp_plans.styles import ExpertsParallel, NoParallel, Style


def tied_modules(planned: PlannedTree, root: str) -> Mapping[str, Style]:
    """Return rules for the modules without any that share their parameters with modules that have rules."""
    # An encoder and a decoder of the same weights (Diffusion Gemma) have one plan: a parameter has one layout, inside
    # and outside of the language model.
    rules: dict[str, Style] = {}
    for source, target in _tied_pairs(planned):
        for path, style in planned.styles.items():
            twin = join(target, path.removeprefix(source).removeprefix("."))
            known = twin in planned.modules or twin in planned.parameters
            if path != source and is_at_or_below(path, source) and known and planned.style(twin) is None:
                rules[twin] = style
    return merge_per_block(rules.items(), planned.tree)


def _tied_pairs(planned: PlannedTree) -> dict[tuple[str, str], None]:
    """Return pairs of modules that share all parameters: one with rules, one without."""
    pairs: dict[tuple[str, str], None] = {}
    for group in planned.tree.tied:
        with_layout = [path for path in group if planned.layout(path) is not None]
        for path in (path for path in group if planned.layout(path) is None):
            for other in with_layout[:1]:
                pair = _without_common_end(other, path)
                if all(module in planned.modules for module in pair):
                    pairs[pair] = None
    return pairs


def _without_common_end(one: str, other: str) -> tuple[str, str]:
    first, second = one.split("."), other.split(".")
    while first and second and first[-1] == second[-1]:
        first.pop()
        second.pop()
    return ".".join(first), ".".join(second)


#: The one activation of transformers with parameters, learned scalars, which any config can name (Apertus).
_ACTIVATION = "XIELUActivation"


def with_learned_activations(plan: Plan, tree: ModelTree) -> Plan:
    """Return a plan with rules for activations with parameters: each rank sees a part of their input."""
    # Not where the features are gathered before: there its gradient is full on every rank.
    planned = PlannedTree(tree, plan)
    partial = []
    for path, module in tree.modules.items():
        if type(module).__name__ == _ACTIVATION and planned.style(path) is None:
            in_experts = any(isinstance(planned.style(above), ExpertsParallel) for above in ancestors(path))
            if in_experts or planned.split_children(parent(path)):
                partial.append((path, NoParallel(gradient="partial")))
    return plan.override(merge_per_block(partial, tree))


#: Every step sees the rules that the steps before it have added.
STEPS = (
    *(split_sublayers, split_in_heads, per_head_norms, with_replicated_kv_heads),
    *(shard_storage, embedding_submodules, tied_modules),
)


def complete_plan(plan: Plan, model: Any, *, root: str = "") -> Plan:
    """Return the plan with attention sharded by heads and with rules for replicated parameters."""
    # Its own rules stay, but for the head sizes that they lack. Nothing outside of ``root``, the language model, is
    # added (a vision tower stays replicated).
    tree = ModelTree.of(model)
    for step in STEPS:
        plan = plan.override(step(PlannedTree(tree, plan), root))
    return plan


def require_no_adapters(tree: ModelTree) -> None:
    """Refuse a model with low-rank adapters: its layers have other names and shapes than the architecture's."""
    for path in tree.modules:
        layer = parent(path)
        if path.endswith(".base_layer") and join(layer, "lora_A") in tree.modules:
            raise PlanError(
                f"{layer} of {type(tree.model).__name__} carries low-rank adapters: make the plan before "
                "peft.get_peft_model, and give it to fsdp_runtime.parallelize, which adds the rules of the adapters"
            )
