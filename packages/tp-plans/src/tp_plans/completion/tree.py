"""A model's tree and what a plan says of it, as the steps of completion ask."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from tp_plans._torch_compat import own_parameters
from tp_plans.layouts import Shard
from tp_plans.patterns import wildcard
from tp_plans.plan import Plan
from tp_plans.styles import ColwiseParallel, ExpertsParallel, GatheredParameters, Style

#: What norms over queries, keys and values are called.
HEAD_NORMS = ("q_norm", "k_norm", "v_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")


class Tree:
    """One plan against one model's modules.

    Args:
        plan: the plan.
        modules: path to module.
        root: where the language model sits.

    Attributes:
        children: the names right below every module.
        places: the modules and parameters at the places that are alike in all blocks, by their pattern.
    """

    def __init__(self, plan: Plan, modules: Mapping[str, Any], root: str = "") -> None:
        self.plan, self.modules, self.root = plan, modules, root
        self._rules = {path: plan.match(path) for path in modules}
        self.children: dict[str, list[str]] = defaultdict(list)
        self.places: dict[str, dict[str, None]] = defaultdict(dict)  # ordered, so that every rank has one order
        self._filled: set[str] = set()
        for path, module in modules.items():
            parent, _, name = path.rpartition(".")
            if path:
                self.children[parent].append(name)
            self.places[wildcard(path)][path] = None
            for name in parameters_of(module):
                self.places[wildcard(f"{path}.{name}")][f"{path}.{name}"] = None
            if parameters_of(module):
                self._filled.update(with_ancestors(path))

    def rule(self, path: str) -> str | None:
        """The pattern of the plan that stands for a path."""
        rules = self._rules[path] if path in self._rules else self.plan.match(path)
        return rules[0] if rules else None

    def style(self, path: str) -> Style | None:
        """What the plan says of a module or bare parameter."""
        rule = self.rule(path)
        return None if rule is None else self.plan[rule]

    def paths(self) -> Iterable[str]:
        """Every module and parameter."""
        return (path for places in self.places.values() for path in places)

    def is_gathered(self, parameter: str) -> bool:
        """Whether a module above stores a parameter split and gathers it."""
        return any(
            isinstance(style := self.style(above), GatheredParameters)
            and parameter[len(above) :].removeprefix(".") in style.names
            for above in ("", *with_ancestors(parameter.rpartition(".")[0]))
        )

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


def join(path: str, name: str) -> str:
    """The path of a child."""
    return f"{path}.{name}" if path else name


def is_split(style: Style | None) -> TypeGuard[ColwiseParallel]:
    """Whether a layer hands on its own features as a plain tensor."""
    return isinstance(style, ColwiseParallel) and style.output_layouts == Shard(-1) and style.use_local_output


def parameters_of(module: Any) -> dict[str, Any]:
    """A module's own parameters."""
    return {name: value for name, value in own_parameters(module).items() if value is not None}


def size_of(module: Any, dim: int) -> int | None:
    """A size of a module's weight matrix, if it has one."""
    weight = parameters_of(module).get("weight")
    return int(weight.shape[dim]) if weight is not None and weight.ndim == 2 else None


def is_linear(module: Any) -> bool:
    """Whether a module is torch's linear layer and no relative of it, which might compute something else."""
    return type(module).__name__ == "Linear"


def agreed(places: Iterable[tuple[str, Style]], tree: Tree) -> dict[str, Style]:
    """Rules for single paths, merged into one for all blocks where every such place in the model is told the same."""
    found: dict[str, dict[str, Style]] = defaultdict(dict)
    for path, style in places:
        found[wildcard(path)][path] = style
    rules: dict[str, Style] = {}
    for pattern, told in found.items():
        if len(set(told.values())) == 1 and tree.places[pattern].keys() <= told.keys():
            rules[pattern] = next(iter(told.values()))
        else:
            rules.update(told)
    return rules


def with_ancestors(path: str) -> Iterable[str]:
    """A path and those above it, nearest first, but for the top."""
    while path:
        yield path
        path = path.rpartition(".")[0]
