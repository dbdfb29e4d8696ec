"""The translation of the plans that transformers ships with its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tp_plans.completion import completed
from tp_plans.errors import CapabilityError, PlanError
from tp_plans.hugging_face.overrides import NO_SEQUENCE_PARALLELISM, with_overrides
from tp_plans.hugging_face.style_names import IGNORED_STYLES, STYLE_BY_NAME, parameter_style_from_name, style_from_name
from tp_plans.hugging_face.tp_plan import path_of, shipped_plan
from tp_plans.matches import Matches
from tp_plans.plan import Plan
from tp_plans.sequence_parallel import with_sequence_parallelism
from tp_plans.styles import ColwiseParallel, ExpertsParallel, RowwiseParallel, Style, VocabParallelEmbedding

#: The words that a linear output head may carry; all become logits sharded on the vocabulary.
_HEAD_WORDS = {"colwise", "colwise_rep", "colwise_gather_output"}


def from_hugging_face(model: Any, *, sequence_parallel: bool = False) -> Plan:
    """The tensor-parallel plan that transformers ships for a model, merged from all its levels, translated, completed.

    Beyond translation, the head keeps its logits sharded on the vocabulary, attention is split in whole heads, and
    what the shipped plan leaves whole is split where that is certain to be right (``tp_plans.completion``).  Rules
    for what this model does not have, as the experts of a config without any, are left out.

    Args:
        model: a ``transformers`` model; the meta device is enough.
        sequence_parallel: give the plan's sequence-parallel form (``tp_plans.sequence_parallel``).

    Raises:
        PlanError: the model ships no plan, or is no model.
        UnknownStyleError: it uses a style word that has no translation.
        CapabilityError: sequence parallelism is asked of a model that has no such form.
    """
    if isinstance(model, type) or not hasattr(model, "named_modules"):
        raise PlanError(
            f"from_hugging_face needs a model, since its plan comes from every inner model and config; {model!r} is "
            "none (build it on the meta device, or use tp_plans.plan_for)"
        )
    words = shipped_plan(model)
    name = type(model).__name__
    if not words:
        raise PlanError(
            f"{name} ships no tensor-parallel plan (no _tp_plan, no base_model_tp_plan): "
            "use tp_plans.plan_for or give a plan of your own"
        )
    modules = dict(model.named_modules())
    rules = dict(_translated(words, Matches(words, modules)))
    if not rules:
        raise PlanError(
            f"{name} ships a plan of which nothing matches its modules ({', '.join(words)}): "
            "use tp_plans.plan_for or give a plan of your own"
        )
    head = path_of(modules, model, "get_output_embeddings")
    embedding = path_of(modules, model, "get_input_embeddings")
    if head is not None and (words.get(head) in _HEAD_WORDS or _is_free(head, rules, modules)):
        rules[head] = ColwiseParallel(use_local_output=False)
    if embedding is not None and embedding not in rules and _may_split(modules, embedding, head, rules):
        rules[embedding] = VocabParallelEmbedding()
    root = "" if embedding is None else embedding.rpartition(".")[0]
    plan = completed(with_overrides(Plan(rules, name=f"hf:{name}"), modules), modules, root=root)
    if not sequence_parallel:
        return plan
    if (reason := _no_sequence_parallelism(modules)) is not None:
        raise CapabilityError(f"{name} has no sequence-parallel form: {reason}; pass sequence_parallel=False")
    if embedding is None:
        raise PlanError(f"{name} does not tell its token embedding: sequence parallelism cannot be derived for it")
    return with_sequence_parallelism(plan, modules, embedding=embedding)


def _no_sequence_parallelism(modules: Mapping[str, Any]) -> str | None:
    """Why a model's stream cannot be cut, if it cannot."""
    names = (type(module).__name__ for module in modules.values())
    return next((NO_SEQUENCE_PARALLELISM[name] for name in names if name in NO_SEQUENCE_PARALLELISM), None)


def _translated(words: Mapping[str, str], matches: Matches) -> Iterator[tuple[str, Style]]:
    """The rules that match something; those of parameters inside split experts are the experts' own."""
    experts = [p for p, word in words.items() if isinstance(STYLE_BY_NAME.get(word), ExpertsParallel)]
    for pattern, word in words.items():
        if word in IGNORED_STYLES:
            continue
        if modules := matches.modules.get(pattern):
            yield pattern, _for_module(style_from_name(word, where=pattern), modules)
        elif parameters := matches.parameters.get(pattern):
            if not any(pattern.startswith(f"{owner}.") for owner in experts):
                yield pattern, parameter_style_from_name(word, parameters[0].ndim, where=pattern)
        else:
            style_from_name(word, where=pattern)  # a word that nobody knows is told even where nothing bears it


def _for_module(style: Style, modules: list[Any]) -> Style:
    """The style as the kind of module wants it: until 5.0, an embedding's table was split by ``rowwise``."""
    if isinstance(style, RowwiseParallel) and all(hasattr(module, "num_embeddings") for module in modules):
        return VocabParallelEmbedding()
    return style


def _is_free(head: str, rules: Mapping[str, Style], modules: Mapping[str, Any]) -> bool:
    """Whether a head of which the plan says nothing is torch's own layer, whose output may be split."""
    return head not in rules and type(modules[head]).__name__ == "Linear"


def _may_split(modules: Mapping[str, Any], embedding: str, head: str | None, rules: Mapping[str, Style]) -> bool:
    """Whether the embedding may be split: not where it is tied to a head that stays whole."""
    return head is None or head in rules or getattr(modules[head], "weight", None) is not modules[embedding].weight
