"""The translation of the plans that transformers ships with its models.

A Hugging Face plan maps module patterns to style words.  It comes in pieces: on the model class (the head), on
the config (the blocks), and on every inner model, each relative to where that model sits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tp_plans.errors import PlanError, UnknownStyleError
from tp_plans.layouts import Replicate
from tp_plans.plan import Plan
from tp_plans.styles import (
    ColwiseParallel,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    Style,
    VocabParallelEmbedding,
)

#: transformers' style words, 4.57 to 5.23, as data.
STYLE_WORDS: dict[str, Style] = {
    "colwise": ColwiseParallel(),
    "colwise_rep": ColwiseParallel(output=Replicate()),
    "colwise_gather_output": ColwiseParallel(output=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_rep": RowwiseParallel(input=Replicate()),
    "rowwise_split_input": RowwiseParallel(input=Replicate()),
    "embedding_rowwise": VocabParallelEmbedding(),
    "sequence_parallel": SequenceParallel(),
    "replicate": Replicated(),
    "replicated_with_grad_allreduce": Replicated(gradient="partial"),
}

#: The words that a linear output head may carry; all become logits sharded on the vocabulary.
_HEAD_WORDS = {"colwise", "colwise_rep", "colwise_gather_output"}


def style_from_word(word: str, *, where: str = "") -> Style:
    """The style that a word of transformers' plans means.

    Raises:
        UnknownStyleError: the word is in no table.
    """
    try:
        return STYLE_WORDS[word]
    except (KeyError, TypeError):
        place = f" for {where!r}" if where else ""
        raise UnknownStyleError(
            f"unknown style word {word!r}{place}: known are {', '.join(sorted(STYLE_WORDS))}. "
            "Give a plan of your own in which this rule is a style of tp_plans, as ColwiseParallel()."
        ) from None


def from_hugging_face(model: Any) -> Plan:
    """The tensor-parallel plan that transformers ships for a model, merged from all its levels and translated.

    Beyond translation, the head keeps its logits sharded on the vocabulary, the token embedding is split on the
    vocabulary where the plan says nothing of it, and attention projections are marked to be split in whole heads.

    Args:
        model: a ``transformers`` model; the meta device is enough.

    Raises:
        PlanError: the model ships no plan, or is no model.
        UnknownStyleError: it uses a style word that has no translation.
    """
    if isinstance(model, type) or not hasattr(model, "named_modules"):
        raise PlanError(
            f"from_hugging_face needs a model, since its plan comes from every inner model and config; {model!r} is "
            "none (build it on the meta device, or use tp_plans.plan_for)"
        )
    words = _merged_words(model)
    name = type(model).__name__
    if not words:
        raise PlanError(
            f"{name} ships no tensor-parallel plan (no _tp_plan, no base_model_tp_plan): "
            "use tp_plans.plan_for or give a plan of your own"
        )
    modules = dict(model.named_modules())
    head = _path_of(modules, model, "get_output_embeddings")
    embedding = _path_of(modules, model, "get_input_embeddings")
    rules = {pattern: style_from_word(word, where=pattern) for pattern, word in words.items()}
    if head is not None and words.get(head) in _HEAD_WORDS:
        rules[head] = ColwiseParallel(use_local_output=False)
    if embedding is not None and embedding not in rules and _may_split(modules, embedding, head, rules):
        rules[embedding] = VocabParallelEmbedding()
    plan = Plan(rules, name=f"hf:{name}")
    return plan.override(dict(_in_whole_heads(plan, modules)))


def _merged_words(model: Any) -> dict[str, str]:
    """The class's plan under those of all inner models, from the config and the instance; outer over inner."""
    words: dict[str, str] = dict(getattr(type(model), "_tp_plan", None) or {})
    for path, module in reversed(list(model.named_modules())):
        prefix = f"{path}." if path else ""
        config = getattr(module, "config", None)
        if getattr(module, "base_model", None) is module:  # the config's plan is relative to the base model
            words.update(_prefixed(prefix, getattr(config, "base_model_tp_plan", None)))
        words.update(_prefixed(prefix, getattr(module, "_tp_plan", None)))
    return words


def _prefixed(prefix: str, words: Mapping[str, str] | None) -> dict[str, str]:
    return {f"{prefix}{pattern}": word for pattern, word in (words or {}).items()}


def _path_of(modules: Mapping[str, Any], model: Any, getter: str) -> str | None:
    try:
        wanted = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return next((path for path, module in modules.items() if module is wanted), None)


def _may_split(modules: Mapping[str, Any], embedding: str, head: str | None, rules: Mapping[str, Style]) -> bool:
    """Whether the embedding may be split: not where it is tied to a head that stays whole."""
    return head is None or head in rules or getattr(modules[head], "weight", None) is not modules[embedding].weight


def _in_whole_heads(plan: Plan, modules: Mapping[str, Any]) -> Iterator[tuple[str, Style]]:
    for path in modules:
        parent, _, _ = path.rpartition(".")
        if not isinstance(getattr(modules.get(parent), "head_dim", None), int):
            continue
        for pattern in plan.match(path):
            style = plan[pattern]
            if isinstance(style, (ColwiseParallel, RowwiseParallel)):
                yield pattern, replace(style, unit="head_dim")
