"""Give activations that have parameters the rules of what they see."""

from __future__ import annotations

from tp_plans.model_tree import ModelTree, ancestors, parent
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree, merge_per_block
from tp_plans.styles import ExpertsParallel, NoParallel

#: The one activation of transformers with parameters, learned scalars, which any config can name (Apertus).
_ACTIVATION = "XIELUActivation"


def with_learned_activations(plan: Plan, tree: ModelTree) -> Plan:
    """Return a plan with rules for activations that have parameters: each rank sees its own features, or tokens, only.

    Not where the features are gathered before: there its gradient is full on every rank.
    """
    planned = PlannedTree(tree, plan)
    partial = (
        (path, NoParallel(gradient="partial"))
        for path, module in tree.modules.items()
        if type(module).__name__ == _ACTIVATION and planned.style(path) is None and _sees_a_part(path, planned)
    )
    return plan.override(merge_per_block(partial, tree))


def _sees_a_part(path: str, planned: PlannedTree) -> bool:
    in_experts = any(isinstance(planned.style(above), ExpertsParallel) for above in ancestors(path))
    return in_experts or bool(planned.split_children(parent(path)))
