"""What the patterns of a plan match in a model's tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from tp_plans._torch_compat import own_parameters
from tp_plans.patterns import Patterns


class Matches:
    """The modules and bare parameters of a tree, by the patterns that they match.

    Args:
        patterns: the patterns.
        modules: path to module, as ``dict(model.named_modules())``.
    """

    def __init__(self, patterns: Iterable[str], modules: Mapping[str, Any]) -> None:
        known = Patterns(patterns)
        self.modules = _found(known, modules)
        self.parameters = _found(known, parameters_of(modules))


def parameters_of(modules: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter of a tree by path, tied ones at each of their places."""
    return {
        f"{path}.{name}" if path else name: parameter
        for path, module in modules.items()
        for name, parameter in own_parameters(module).items()
        if parameter is not None
    }


def _found(known: Patterns, tree: Mapping[str, Any]) -> Mapping[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for path, value in tree.items():
        for pattern in known.match(path):
            found[pattern].append(value)
    return found
