"""Translate names and tensors of a checkpoint to a model's, and back."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from typing import Any

from torch import Tensor

from fsdp_runtime._transformers_compat.models import original_classes
from fsdp_runtime.errors import BackendError

#: The first release with the table and the order of weight conversions that this package follows.
OLDEST = (5, 10)
#: The attribute of a model with the prefixes of added modules by their prefixes in checkpoints.
_RENAMED = "_fsdp_runtime_renamed"


@dataclass(frozen=True)
class Conversion:
    """One use of a ``WeightConverter``: tensors that are fused, merged or cut into other tensors."""

    sources: tuple[str, ...]  # names of the input tensors, in transformers' order
    run: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]  # tensors by name to results by final name


@dataclass(frozen=True)
class Translation:
    """The renamings and conversions of tensors from one side to the other."""

    renamed: Mapping[str, str]  # names on the other side, for unchanged tensors
    conversions: Sequence[Conversion]  # for all other names
    rules: list[Any] = field(default_factory=list)  # the rules that applied, for :func:`remember_rules`


@cache
def installed_release() -> str:
    """The installed transformers release, read from disk once: every module with buffers asks."""
    return metadata.version("transformers")


def require_known_release() -> None:
    """Refuse a transformers release that renames, fuses or initialises differently from the known releases."""
    release = installed_release()
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BackendError(
            f"transformers {release} is installed. This package does not know its checkpoint names and fused weights: "
            f"it reads, writes and streams weights of models of transformers {oldest} and later: "
            f"pip install 'transformers>={oldest}'"
        )


def checkpoint_to_model(model: Any, checkpoint_names: Iterable[str], known: set[str]) -> Translation:
    """Return the translation of a checkpoint's names to the ``known`` names of a transformers model."""
    # ``from_pretrained`` renames (and for some architectures merges) checkpoint tensors by a table without a public
    # reader; this function follows its order: renamings, then at most one conversion, then the base model's prefix.
    require_known_release()
    from transformers.core_model_loading import rename_source_key

    rules = _conversion_rules(model)
    renamings, converters = _by_kind(rules)
    model_names: dict[str, Any] = dict.fromkeys(known, True)

    def place(name: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, model_names)
        if target in known:
            return target, pattern
        return (name if name in known else target), None  # the rule is for another layout of the same architecture

    translation = _translation(model, converters, checkpoint_names, place, lambda name: name)
    return replace(translation, rules=[rule for rule in rules if rule.was_used()])


def rename_in_checkpoints(model: Any, prefixes: Mapping[str, str]) -> None:
    """Give modules that were added to a model other prefixes in its checkpoints; ``prefixes`` are by these."""
    model.__dict__[_RENAMED] = dict(prefixes)


def remember_rules(model: Any, rules: list[Any]) -> None:
    """Store the rules of a load as ``from_pretrained`` does, so that a save writes the checkpoint's names."""
    model._weight_conversions = rules


def model_to_checkpoint(model: Any, names: Iterable[str]) -> Translation:
    """Return the translation of a transformers model's tensors to the tensors that ``save_pretrained`` writes."""
    require_known_release()
    from transformers.core_model_loading import PrefixChange

    rules = getattr(model, "_weight_conversions", None)
    if rules is None:  # as ``save_pretrained`` of a model that was not loaded: the prefix of a checkpoint is unknown
        rules = [rule for rule in _conversion_rules(model, add_legacy=False) if not isinstance(rule, PrefixChange)]
    renamings, converters = _by_kind([rule.reverse_transform() for rule in reversed(rules)])

    def renamed(name: str) -> str:  # transformers has a function for this only since 5.22
        for rule in renamings:
            name, _ = rule.rename_source_key(name)
        return name

    def place(name: str) -> tuple[str, str | None]:
        for rule in converters:
            target, pattern = rule.rename_source_key(name)
            if pattern is not None:
                return target, pattern
        return renamed(name), None

    return _translation(model, converters, names, place, renamed)


def _translation(
    model: Any,
    converters: list[Any],
    names: Iterable[str],
    place: Callable[[str], tuple[str, str | None]],
    final_name: Callable[[str], str],
) -> Translation:
    """Return the new names of tensors, and one conversion for all tensors with one first target."""
    # ``place`` returns a tensor's target and the matching pattern of a converter, if any. ``final_name`` maps the names
    # of converters to final names.
    from transformers.core_model_loading import dot_natural_key

    renamed: dict[str, str] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = place(name)
        if pattern is None:
            renamed[name] = target
        else:
            groups.setdefault(target, []).append((pattern, name))
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    def conversion(target: str, members: list[tuple[str, str]]) -> Conversion:
        def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            once = copy.deepcopy(by_pattern[members[0][0]])
            for pattern, name in members:
                once.add_tensor(target, name, pattern, tensors[name])
            made = once.convert(target, model=model, config=model.config)
            return {final_name(name): value[0] if isinstance(value, list) else value for name, value in made.items()}

        return Conversion(tuple(name for _, name in members), run)

    return Translation(renamed, [conversion(target, members) for target, members in groups.items()])


def _conversion_rules(model: Any, **options: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    with original_classes(model):
        rules = list(get_model_conversion_mapping(model, **options))
    renamed = model.__dict__.get(_RENAMED, {})
    return [WeightRenaming(f"^{re.escape(name)}", target) for name, target in renamed.items()] + rules


def _by_kind(rules: list[Any]) -> tuple[list[Any], list[Any]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in rules if isinstance(rule, WeightConverter)]
