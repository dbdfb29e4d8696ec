"""Parameters that several places share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tp_plans.checks.findings import Finding
from tp_plans.checks.tree import Tree


def untied(tree: Tree) -> Iterator[Finding]:
    """Shared parameters to which the plan gives different layouts."""
    places: dict[int, list[str]] = defaultdict(list)
    for path, parameter in tree.parameters.items():
        places[id(parameter)].append(path)
    for paths in places.values():
        if len(paths) > 1 and len({tree.layout(path) for path in paths}) > 1:
            told = ", ".join(f"{path}: {tree.layout(path) or 'not in the plan'}" for path in paths)
            yield Finding("error", paths[0], f"tied weights laid out differently ({told})", "give them one layout")
