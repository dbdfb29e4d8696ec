"""A model's tree and what a plan says of it, as the steps of completion ask."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from tp_plans.fields import is_integer
from tp_plans.layouts import Shard
from tp_plans.plan import Plan
from tp_plans.styles import ColwiseParallel, ExpertsParallel, Style


class Tree:
    """One plan against one model's modules.

    Args:
        plan: the plan.
        modules: path to module.
        root: where the language model sits.
    """

    def __init__(self, plan: Plan, modules: Mapping[str, Any], root: str = "") -> None:
        self.plan, self.modules, self.root = plan, modules, root
        self._rules = {path: plan.match(path) for path in modules}
        self.children: dict[str, list[str]] = defaultdict(list)
        self._filled: set[str] = set()
        for path, module in modules.items():
            parent, _, name = path.rpartition(".")
            if path:
                self.children[parent].append(name)
            if parameters_of(module):
                self._filled.update(_with_ancestors(path))

    def rule(self, path: str) -> str | None:
        """The pattern of the plan that stands for a path."""
        rules = self._rules[path] if path in self._rules else self.plan.match(path)
        return rules[0] if rules else None

    def style(self, path: str) -> Style | None:
        """What the plan says of a module or bare parameter."""
        rule = self.rule(path)
        return None if rule is None else self.plan[rule]

    def inside(self) -> Iterable[tuple[str, Any]]:
        """The language model's modules, but for what is inside split experts."""
        experts: list[str] = []
        for path, module in self.modules.items():
            if self.root and path != self.root and not path.startswith(f"{self.root}."):
                continue
            if any(path.startswith(f"{owner}.") for owner in experts):
                continue
            if isinstance(self.style(path), ExpertsParallel):
                experts.append(path)
            yield path, module

    def filled(self, path: str) -> set[str]:
        """The children that hold parameters, themselves or below."""
        return {name for name in self.children[path] if f"{path}.{name}".lstrip(".") in self._filled}

    def module(self, path: str, name: str) -> Any:
        """A child."""
        return self.modules[f"{path}.{name}" if path else name]

    def untouched(self, path: str, names: Iterable[str]) -> bool:
        """Whether the plan says nothing of a module's children of these names."""
        return all(self.style(f"{path}.{name}") is None for name in names)

    def split_children(self, path: str) -> list[str]:
        """The children whose output is this rank's part only."""
        return [name for name in self.children[path] if is_split(self.style(f"{path}.{name}"))]


def is_split(style: Style | None) -> TypeGuard[ColwiseParallel]:
    """Whether a layer hands on its own features as a plain tensor."""
    return isinstance(style, ColwiseParallel) and style.output == Shard(-1) and style.use_local_output


def parameters_of(module: Any) -> dict[str, Any]:
    """A module's own parameters."""
    return {name: value for name, value in getattr(module, "_parameters", {}).items() if value is not None}


def size_of(module: Any, dim: int) -> int | None:
    """A size of a module's weight matrix, if it has one."""
    weight = parameters_of(module).get("weight")
    return int(weight.shape[dim]) if weight is not None and weight.ndim == 2 else None


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer: it says how many features come in and go out."""
    return all(is_integer(getattr(module, name, None), least=1) for name in ("in_features", "out_features"))


def generalised(path: str) -> str:
    """The pattern of a path: every number becomes ``*``, as ``model.layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def agreed(places: Iterable[tuple[str, Style]]) -> dict[str, Style]:
    """Rules for paths as rules for their patterns, where all paths of a pattern are told the same."""
    found: dict[str, set[Style]] = defaultdict(set)
    for path, style in places:
        found[generalised(path)].add(style)
    return {pattern: next(iter(styles)) for pattern, styles in found.items() if len(styles) == 1}


def _with_ancestors(path: str) -> Iterable[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
