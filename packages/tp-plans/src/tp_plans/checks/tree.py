"""A model as the checks read it: its modules and parameters by path, with the rules that each matches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tp_plans._torch_compat import own_parameters
from tp_plans._validate import is_integer
from tp_plans.layouts import Layout, Shard
from tp_plans.module_attrs import getattr_path
from tp_plans.patterns import wildcard as wildcard
from tp_plans.plan import Plan
from tp_plans.styles import GatheredParameters, GatherSequence, ParameterStyle, Style, parameter_layout


@dataclass(frozen=True)
class Tree:
    """One plan against one model.

    Args:
        plan: the plan.
        modules: every module by path, parents first.
        parameters: every parameter by each path that leads to it.
        rules: the patterns that each module matches, and each parameter (those of bare parameters).
        children: the modules right below each module.
    """

    plan: Plan
    modules: Mapping[str, Any]
    parameters: Mapping[str, Any]
    rules: Mapping[str, list[str]]
    children: Mapping[str, list[str]]

    def styled(self) -> Iterator[tuple[str, Style]]:
        """Every module in the plan, with its style."""
        yield from ((path, style) for path, style in self.styles.items() if path in self.modules)

    @cached_property
    def styles(self) -> Mapping[str, Style]:
        """The style of every module and bare parameter that has one; the first where several rules match."""
        return {path: self.plan[patterns[0]] for path, patterns in self.rules.items() if patterns}

    def style(self, path: str) -> Style | None:
        """The style of a module or bare parameter."""
        return self.styles.get(path)

    def own_style(self, path: str) -> Style | None:
        """The style of a module's own work: what is behind the door, where it has one."""
        style = self.style(path)
        return style.inner if isinstance(style, GatherSequence) else style

    def layout(self, parameter: str) -> Layout | None:
        """How a parameter lies over the axis; ``None`` where the plan says nothing of it."""
        if self._is_gathered(parameter):
            return Shard(0)
        style = self.style(parameter) or self.style(parent(parameter))
        return parameter_layout(style, self.parameters[parameter].ndim)

    def _is_gathered(self, parameter: str) -> bool:
        """Whether a module above stores the parameter split."""
        return self._gathers and any(
            isinstance(style := self.own_style(above), GatheredParameters)
            and parameter[len(above) :].removeprefix(".") in style.names
            for above in ancestors(parameter)
        )

    @cached_property
    def _gathers(self) -> bool:
        return any(isinstance(self.own_style(path), GatheredParameters) for path in self.styles)

    def own_parameters(self, path: str) -> dict[str, Any]:
        """A module's parameters by their own names."""
        return {name: value for name, value in own_parameters(self.modules[path]).items() if value is not None}

    def weight(self, path: str) -> Any | None:
        """A module's weight where it is a matrix."""
        weight = own_parameters(self.modules[path]).get("weight")
        return weight if weight is not None and weight.ndim == 2 else None

    def number(self, path: str, value: int | str) -> int | None:
        """A number, or the positive integer of that name that the module above ``path`` has."""
        found = getattr_path(self.modules[parent(path)], value) if isinstance(value, str) else value
        return found if is_integer(found, least=1) else None


def tree_of(plan: Plan, model: Any) -> Tree:
    """Read a model through ``named_modules`` and each module's parameters."""
    modules = dict(model.named_modules())
    parameters = {
        join(path, name): parameter
        for path, module in modules.items()
        for name, parameter in own_parameters(module).items()
        if parameter is not None
    }
    bare = {pattern for pattern, style in plan.items() if isinstance(style, ParameterStyle)}
    rules = {path: [pattern for pattern in plan.match(path) if pattern not in bare] for path in modules}
    for path in parameters:
        rules[path] = [pattern for pattern in plan.match(path) if pattern in bare] if bare else []
    children: dict[str, list[str]] = {path: [] for path in modules}
    for path in modules:
        if path:
            children[parent(path)].append(path)
    return Tree(plan, modules, parameters, rules, children)


def parent(path: str) -> str:
    """The path above."""
    return path.rpartition(".")[0]


def join(path: str, name: str) -> str:
    """The path of a child."""
    return f"{path}.{name}" if path else name


def ancestors(path: str) -> Iterator[str]:
    """The paths above, nearest first, to the top."""
    while path:
        path = parent(path)
        yield path
