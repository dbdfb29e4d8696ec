"""The parameters that a plan leaves replicated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile
from math import prod
from typing import Any

from tp_plans.checks.findings import Finding
from tp_plans.layouts import Shard
from tp_plans.model_tree import ancestors, parent
from tp_plans.patterns import wildcard
from tp_plans.planned_tree import PlannedTree
from tp_plans.text import format_bytes

#: The least share of a model's bytes for which a replicated part is reported.
MIN_SHARE = 0.01


def check_replicated(planned: PlannedTree) -> Iterator[Finding]:
    """Find the largest parts of the model that stay replicated."""
    sizes = {path: size_of(parameter) for path, parameter in _one_path_each(planned).items()}
    split = {path for path in sizes if isinstance(planned.layout(path), Shard)}
    reached = {above for path in split for above in ancestors(path)}
    groups: dict[str, list[str]] = defaultdict(list)
    for path in sizes:
        if path not in split:
            groups[wildcard(_highest_unsplit(path, reached))].append(path)
    total = sum(sizes.values())
    for where, paths in sorted(groups.items(), key=lambda group: -sum(sizes[path] for path in group[1])):
        size = sum(sizes[path] for path in paths)
        if size and size >= MIN_SHARE * total:
            largest = max(paths, key=lambda path: sizes[path])
            shape = list(planned.parameters[largest].shape)
            problem = f"{format_bytes(size)}, {size / total:.1%} of the model, replicated on every rank"
            count = f"{len(paths)} parameter{'s' * (len(paths) > 1)}, largest {largest} {shape}"
            yield Finding("warning", where, f"{problem} ({count})", _advice(paths, planned))


def size_of(parameter: Any) -> int:
    """Return the bytes of a parameter, or its number of elements where it has no ``nbytes``."""
    size = getattr(parameter, "nbytes", None)
    return size if isinstance(size, int) else prod(parameter.shape)


def _one_path_each(planned: PlannedTree) -> dict[str, Any]:
    """Return every parameter by one of its paths; of tied parameters, a split one."""
    by_identity: dict[int, str] = {}
    for path, parameter in planned.parameters.items():
        if id(parameter) not in by_identity or isinstance(planned.layout(path), Shard):
            by_identity[id(parameter)] = path
    return {path: planned.parameters[path] for path in by_identity.values()}


def _highest_unsplit(path: str, reached: set[str]) -> str:
    """Return the highest module above a parameter without any sharded parameter, or the parameter itself."""
    *_, highest = path, *takewhile(lambda above: above not in reached, ancestors(path))
    return highest


def _advice(paths: list[str], planned: PlannedTree) -> str:
    ruled = any(planned.style(path) or planned.style(parent(path)) for path in paths)
    return "its rule says so: accept it, or split it" if ruled else "no rule splits it: add one, or accept it"
