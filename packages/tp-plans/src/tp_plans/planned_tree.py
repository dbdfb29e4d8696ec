"""A plan on a model: the rule, style and layout of every module and parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tp_plans._validate import is_integer
from tp_plans.layouts import Layout, Shard
from tp_plans.model_tree import ModelTree, ancestors, is_at_or_below, parent
from tp_plans.module_attrs import getattr_path
from tp_plans.naming import leaf
from tp_plans.patterns import wildcard
from tp_plans.plan import Plan
from tp_plans.styles import (
    ColwiseEmbedding,
    ColwiseParallel,
    DispatchExperts,
    ExpertsParallel,
    GatheredParameters,
    GatherSequence,
    MLAKVProjection,
    ParameterStyle,
    Style,
    VocabParallelEmbedding,
    parameter_layout,
)


@dataclass(frozen=True, eq=False)
class PlannedTree:
    """One plan against one model."""

    tree: ModelTree
    plan: Plan

    @property
    def modules(self) -> Mapping[str, Any]:
        """Every module of the model by path."""
        return self.tree.modules

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Every parameter of the model by path."""
        return self.tree.parameters

    @property
    def children(self) -> Mapping[str, tuple[str, ...]]:
        """The paths of the modules directly below each module."""
        return self.tree.children

    @cached_property
    def rules(self) -> Mapping[str, list[str]]:
        """The patterns that each module matches, and the ``ParameterStyle`` patterns that each parameter matches."""
        of_parameters = {pattern for pattern, style in self.plan.items() if isinstance(style, ParameterStyle)}
        rules = {path: [p for p in self.plan.match(path) if p not in of_parameters] for path in self.modules}
        for path in self.parameters:
            matched = self.plan.match(path) if of_parameters else []
            rules[path] = [pattern for pattern in matched if pattern in of_parameters]
        return rules

    @cached_property
    def styles(self) -> Mapping[str, Style]:
        """The style of every module and parameter that has a rule; of several rules, the first."""
        return {path: self.plan[patterns[0]] for path, patterns in self.rules.items() if patterns}

    def styled_modules(self) -> Iterator[tuple[str, Style]]:
        """Iterate over the modules that have a rule, with their styles."""
        yield from ((path, style) for path, style in self.styles.items() if path in self.modules)

    @cached_property
    def embedding_width(self) -> int | None:
        """The width of the first embedding that is split and has a table; ``None`` where there is none."""
        split = (p for p, s in self.styled_modules() if isinstance(s, (VocabParallelEmbedding, ColwiseEmbedding)))
        return next((table.shape[1] for path in split if (table := self.tree.weight(path)) is not None), None)

    def rule(self, path: str) -> str | None:
        """Return the pattern that a module or parameter matches first."""
        return next(iter(self.rules.get(path, ())), None)

    def style(self, path: str) -> Style | None:
        """Return the style of a module or parameter."""
        return self.styles.get(path)

    def own_style(self, path: str) -> Style | None:
        """Return the style of a module's own computation: the inner one of a ``GatherSequence``."""
        style = self.style(path)
        return style.inner if isinstance(style, GatherSequence) else style

    def layout(self, parameter: str) -> Layout | None:
        """Return a parameter's layout on the axis; ``None`` where the plan has no rule for it."""
        if self.is_gathered(parameter):
            return Shard(0)
        style = self.style(parameter) or self.style(parent(parameter))
        return parameter_layout(style, self.parameters[parameter].ndim)

    def is_gathered(self, parameter: str) -> bool:
        """Return whether a ``GatheredParameters`` rule of a module above names the parameter."""
        return self._gathers and any(
            isinstance(style := self.own_style(above), GatheredParameters)
            and parameter[len(above) :].removeprefix(".") in style.names
            for above in ancestors(parameter)
        )

    @cached_property
    def _gathers(self) -> bool:
        return any(isinstance(self.own_style(path), GatheredParameters) for path in self.styles)

    def outputs_local_shard(self, path: str) -> bool:
        """Return whether a layer's output is a plain tensor of this rank's features."""
        style = self.style(path)
        is_split = isinstance(style, (ColwiseParallel, ColwiseEmbedding))
        return is_split and style.output_layouts == Shard(-1) and style.use_local_output  # type: ignore[union-attr]

    def split_children(self, path: str) -> list[str]:
        """Return the names of the children that output a plain tensor of this rank's features."""
        return [leaf(child) for child in self.children[path] if self.outputs_local_shard(child)]

    def number(self, path: str, value: int | str, *, least: int = 1) -> int | None:
        """Return a number, or the integer attribute of that name, ``least`` or more, of the module above ``path``."""
        number = getattr_path(self.modules[parent(path)], value) if isinstance(value, str) else value
        return number if is_integer(number, least=least) else None

    def fused_rows(self, path: str) -> tuple[int, ...]:
        """Return the rows of each matrix in a module's fused weight; ``()`` for a single matrix."""
        style, rows = self.own_style(path), self.tree.size(path, 0) or 0
        if isinstance(style, MLAKVProjection):
            rotary = self.number(path, style.rope_dim, least=0) or 0
            return (rows - rotary, rotary) if 0 < rotary < rows else ()
        pieces = style.fused_sizes if isinstance(style, ColwiseParallel) else ()
        sizes = [self.number(path, piece) or 0 for piece in pieces]
        return tuple(rows * size // sum(sizes) for size in sizes) if all(sizes) else ()

    def within(self, root: str) -> Iterator[tuple[str, Any]]:
        """Iterate over the modules of the language model at ``root``, except those inside split experts."""
        experts: set[str] = set()
        for path, module in self.modules.items():
            if not is_at_or_below(path, root):
                continue
            if experts and any(above in experts for above in ancestors(path)):
                continue
            if isinstance(self.style(path), (ExpertsParallel, DispatchExperts)):
                experts.add(path)
            yield path, module


def merge_per_block(rules: Iterable[tuple[str, Style]], tree: ModelTree) -> dict[str, Style]:
    """Merge rules of single paths into one for all blocks, where every such path in the model has the same style."""
    by_pattern: dict[str, dict[str, Style]] = defaultdict(dict)
    for path, style in rules:
        by_pattern[wildcard(path)][path] = style
    merged: dict[str, Style] = {}
    for pattern, places in by_pattern.items():
        if len(set(places.values())) == 1 and tree.by_wildcard[pattern].keys() <= places.keys():
            merged[pattern] = next(iter(places.values()))
        else:
            merged.update(places)
    return merged
