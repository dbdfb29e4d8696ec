"""Translate names and tensors of a checkpoint to a model's, and back."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fsdp_runtime._transformers_compat.models import original_classes
from fsdp_runtime._transformers_compat.release import require_known_release

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


def checkpoint_to_model(model: Any, checkpoint_names: Iterable[str], known: set[str]) -> Translation:
    """Return the translation of a checkpoint's names to the ``known`` names of a transformers model."""
    # ``from_pretrained`` renames (and for some architectures merges) checkpoint tensors by a table without a public
    # reader; this function follows its order: renamings, then at most one conversion, then the base model's prefix.
    require_known_release()
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    rules = _conversion_rules(model)
    renamings, converters = _by_kind(rules)
    model_names: dict[str, Any] = dict.fromkeys(known, True)
    renamed: dict[str, str] = {}
    groups = _GroupsByTarget(model, converters)
    for name in sorted(checkpoint_names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, model_names)
        if target not in known and name in known:  # a rule meant for another layout of the same architecture
            target, pattern = name, None
        if pattern is None or target not in known:
            renamed[name] = target
        else:
            groups.add(target, pattern, name)
    used = [rule for rule in rules if rule.was_used()]
    return Translation(renamed, groups.conversions(lambda name: name), used)


def rename_in_checkpoints(model: Any, prefixes: Mapping[str, str]) -> None:
    """Give modules that were added to a model other prefixes in its checkpoints; ``prefixes`` are by these."""
    model.__dict__[_RENAMED] = dict(prefixes)


def remember_rules(model: Any, rules: list[Any]) -> None:
    """Store the rules of a load as ``from_pretrained`` does, so that a save writes the checkpoint's names."""
    model._weight_conversions = rules


def model_to_checkpoint(model: Any, names: Iterable[str]) -> Translation:
    """Return the translation of a transformers model's tensors to the tensors that ``save_pretrained`` writes."""
    require_known_release()
    from transformers.core_model_loading import PrefixChange, dot_natural_key

    rules = getattr(model, "_weight_conversions", None)
    if rules is None:  # as ``save_pretrained`` of a model that was not loaded: the prefix of a checkpoint is unknown
        rules = [rule for rule in _conversion_rules(model, add_legacy=False) if not isinstance(rule, PrefixChange)]
    renamings, converters = _by_kind([rule.reverse_transform() for rule in reversed(rules)])
    renamed: dict[str, str] = {}
    groups = _GroupsByTarget(model, converters)
    for name in sorted(names, key=dot_natural_key):
        target, pattern = _converted(name, converters)
        if pattern is None:
            renamed[name] = _renamed(name, renamings)
        else:
            groups.add(target, pattern, name)
    return Translation(renamed, groups.conversions(lambda name: _renamed(name, renamings)))


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    """Apply all renamings to a name in turn; transformers has a function for this only since 5.22."""
    for rule in renamings:
        name, _ = rule.rename_source_key(name)
    return name


def _converted(name: str, converters: Iterable[Any]) -> tuple[str, str | None]:
    """The target of the first converter that matches a name, and the matching pattern."""
    for rule in converters:
        target, pattern = rule.rename_source_key(name)
        if pattern is not None:
            return target, pattern
    return name, None


class _GroupsByTarget:
    """Tensors grouped by the first target of their converter, as in transformers."""

    def __init__(self, model: Any, converters: list[Any]) -> None:
        self._model = model
        self._converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        self._groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}

    def add(self, target: str, pattern: str, name: str) -> None:
        """Add a tensor to the group of its target."""
        _, members = self._groups.setdefault(target, (self._converters[pattern], []))
        members.append((pattern, name))

    def conversions(self, final_name: Callable[[str], str]) -> list[Conversion]:
        """Return one conversion per group; ``final_name`` maps the names of converters to final names."""

        def conversion(target: str, converter: Any, members: list[tuple[str, str]]) -> Conversion:
            def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
                once = copy.deepcopy(converter)
                for pattern, name in members:
                    once.add_tensor(target, name, pattern, tensors[name])
                made = once.convert(target, model=self._model, config=self._model.config)
                return {
                    final_name(name): value[0] if isinstance(value, list) else value for name, value in made.items()
                }

            return Conversion(tuple(name for _, name in members), run)

        return [conversion(target, converter, members) for target, (converter, members) in self._groups.items()]


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
