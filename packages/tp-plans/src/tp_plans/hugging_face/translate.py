"""The translation of the plans that transformers ships with its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tp_plans._transformers_compat import own_plan
from tp_plans.errors import PlanError
from tp_plans.hugging_face.overrides import with_overrides
from tp_plans.infer.complete import complete_plan, require_no_adapters, with_learned_activations
from tp_plans.infer.sequence_parallel import with_sequence_parallelism
from tp_plans.model_tree import ModelTree, is_at_or_below, parent
from tp_plans.plan import Plan
from tp_plans.styles import ColwiseParallel, ExpertsParallel, RowwiseParallel, Style, VocabParallelEmbedding
from tp_plans.styles.words import IGNORED_STYLES, STYLE_BY_NAME, parameter_style_from_name, style_from_name

#: The words that a linear output head may carry; all become logits sharded on the vocabulary.
_HEAD_WORDS = {"colwise", "colwise_rep", "colwise_gather_output"}


def from_hugging_face(model: Any, *, sequence_parallel: bool = False) -> Plan:
    """Return the plan that transformers ships for a model, merged from all its levels, translated, completed."""
    # Modules without a rule are sharded where that is certainly right. Rules that match nothing in this model, as for
    # the experts of a config without any, are left out.
    if not isinstance(model, ModelTree) and (isinstance(model, type) or not hasattr(model, "named_modules")):
        raise PlanError(
            f"{model!r} is not a model: the plan that transformers ships is in every inner model and config, so build "
            "the model, on the meta device, or take plan_for(name)"
        )
    tree = ModelTree.of(model)
    require_no_adapters(tree)
    words = shipped_plan(tree)
    name = type(tree.model).__name__
    if not words:
        raise PlanError(
            f"{name} ships no tensor-parallel plan (no _tp_plan, no base_model_tp_plan): "
            "plan_for(model) infers and verifies one; or give your own plan"
        )
    rules = dict(_translated(words, tree))
    if not rules:
        raise PlanError(
            f"{name} ships a plan, but none of its patterns matches a module ({', '.join(words)}): "
            "plan_for(model) infers and verifies one; or give your own plan"
        )
    head, embedding = tree.declared("get_output_embeddings"), tree.declared("get_input_embeddings")
    if head is not None and (words.get(head) in _HEAD_WORDS or (head not in rules and tree.is_plain_linear(head))):
        rules[head] = ColwiseParallel(use_local_output=False)
    if embedding is not None and embedding not in rules and _may_split(embedding, head, rules, tree):
        rules[embedding] = VocabParallelEmbedding()
    root = "" if embedding is None else parent(embedding)
    plan = complete_plan(with_overrides(Plan(rules, name=f"hf:{name}"), tree), tree, root=root)
    plan = with_learned_activations(plan, tree)
    if not sequence_parallel:
        return plan
    if embedding is None:
        raise PlanError(f"{name} has no get_input_embeddings(): sequence parallelism cannot be derived for it")
    return with_sequence_parallelism(plan, tree)


def ships_plan_of_blocks(model: Any) -> bool:
    """Return whether the plan that transformers ships has rules for the blocks, or the model has none."""
    # Many classes declare a rule for the head alone, which says nothing of the layers.
    tree = ModelTree.of(model)
    matched = [paths for by_pattern in tree.match(shipped_plan(tree)) for paths in by_pattern.values()]
    inside = (is_at_or_below(path, block) for paths in matched for path in paths for block in tree.decoder_blocks[:1])
    return not tree.decoder_blocks or any(inside)


def _translated(words: Mapping[str, str], tree: ModelTree) -> Iterator[tuple[str, Style]]:
    """The rules that match something; rules of parameters inside split experts join the experts' rule."""
    experts = [p for p, word in words.items() if isinstance(STYLE_BY_NAME.get(word), ExpertsParallel)]
    matched_modules, matched_parameters = tree.match(words)
    for pattern, word in words.items():
        if word in IGNORED_STYLES:
            continue
        if paths := matched_modules.get(pattern):
            modules = [tree.modules[path] for path in paths]
            style = style_from_name(word, where=pattern)
            if isinstance(style, RowwiseParallel) and all(hasattr(module, "num_embeddings") for module in modules):
                style = VocabParallelEmbedding()  # until 5.0, ``rowwise`` split an embedding's table
            yield pattern, style
        elif parameters := matched_parameters.get(pattern):
            if not any(pattern.startswith(f"{owner}.") for owner in experts):
                ndim = tree.parameters[parameters[0]].ndim
                yield pattern, parameter_style_from_name(word, ndim, where=pattern)
        else:
            style_from_name(word, where=pattern)  # an unknown style name is an error even where nothing has it


def _may_split(embedding: str, head: str | None, rules: Mapping[str, Style], tree: ModelTree) -> bool:
    """Return whether the embedding may be sharded: not if a replicated head is tied to it."""
    if head is None or head in rules:
        return True
    return getattr(tree.modules[head], "weight", None) is not tree.modules[embedding].weight


def shipped_plan(tree: ModelTree) -> dict[str, str]:
    """Return pattern to style word, from the plans of classes, inner configs and instances; outer over inner."""
    words: dict[str, str] = dict(own_plan(type(tree.model)) or {})
    for path, module in reversed(list(tree.modules.items())):
        prefix = f"{path}." if path else ""
        config = getattr(module, "config", None)
        if getattr(module, "base_model", None) is module:  # the config's plan is relative to the base model
            words.update(_prefixed(prefix, getattr(config, "base_model_tp_plan", None)))
        words.update(_prefixed(prefix, own_plan(module)))
    return words


def _prefixed(prefix: str, words: Mapping[str, str] | None) -> dict[str, str]:
    return {f"{prefix}{pattern}": word for pattern, word in (words or {}).items()}
