"""A user's own module around models of transformers: a policy with a value head, an actor and a critic, a reward model.

Each inner model has its plan under its path.  Modules around them stay replicated and read full hidden states, so that
their gradients are full on every rank.  A head that is tied to an inner embedding has the embedding's layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tp_plans.errors import UnknownArchitectureError
from tp_plans.infer.full_output import with_full_output
from tp_plans.layouts import Replicate
from tp_plans.model_tree import ModelTree, ancestors, is_at_or_below, join, parent
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree
from tp_plans.styles import ColwiseParallel, Style, VocabParallelEmbedding


def inner_models(tree: ModelTree) -> tuple[str, ...]:
    """Return the paths of the outermost language models of transformers inside another kind of module."""
    if _is_language_model("", tree):
        return ()
    language_models = [path for path in tree.modules if path and _is_language_model(path, tree)]
    models = set(language_models)
    outermost = tuple(path for path in language_models if models.isdisjoint(ancestors(path)))
    if not any(is_at_or_below(tree.decoder or "", path) for path in outermost):
        return ()
    for path in outermost:
        adapted = any(module_path.endswith(".base_layer") for module_path in tree.below(path))
        if adapted and join(path, "base_model") in tree.modules:  # peft's own module stands there
            raise UnknownArchitectureError(
                f"{path} of {type(tree.model).__name__} carries adapters inside a module of yours: give "
                "get_peft_model the outer module, or give a plan"
            )
    return outermost


def plan_around(plans: Mapping[str, Plan], tree: ModelTree) -> Plan:
    """Return the plans of inner models, by their paths, as one plan of the module around them."""
    has_heads = any(
        tree.own_parameters(path) for path in tree.modules if not any(is_at_or_below(path, inner) for inner in plans)
    )
    rules: dict[str, Style] = {}
    for path, plan in plans.items():
        if plan.sequence_parallel and has_heads:
            plan = with_full_output(plan, ModelTree.of(tree.modules[path]))
        rules |= plan.with_prefix(path)
    rules |= {path: ColwiseParallel(output_layouts=Replicate()) for path in _tied_heads(rules, tree)}
    sequence_parallel = any(plan.sequence_parallel for plan in plans.values())
    names = ", ".join(dict.fromkeys(plan.name for plan in plans.values()))
    return Plan(rules, name=f"{type(tree.model).__name__} around {names}", sequence_parallel=sequence_parallel)


def _tied_heads(rules: Mapping[str, Style], tree: ModelTree) -> Iterator[str]:
    """Return the linear layers without a rule that share the weight of a vocabulary-sharded embedding."""
    planned = PlannedTree(tree, Plan(rules))
    for owners in ([parent(path) for path in group] for group in tree.tied):
        if any(isinstance(planned.style(owner), VocabParallelEmbedding) for owner in owners):
            yield from (owner for owner in owners if planned.style(owner) is None and tree.is_plain_linear(owner))


def _is_language_model(path: str, tree: ModelTree) -> bool:
    """Return whether a module is a model of transformers, known by the name of its trunk, that embeds tokens."""
    module = tree.modules[path]
    if not isinstance(getattr(module, "base_model_prefix", None), str) or getattr(module, "config", None) is None:
        return False
    try:
        return hasattr(module.get_input_embeddings(), "num_embeddings")
    except (AttributeError, NotImplementedError):
        return not path
