"""Parameters that several places share."""

from __future__ import annotations

from collections.abc import Iterator

from tp_plans.checks.findings import Finding
from tp_plans.planned_tree import PlannedTree


def check_tied_weights(planned: PlannedTree) -> Iterator[Finding]:
    """Shared parameters to which the plan gives different layouts."""
    for paths in planned.tree.tied:
        if len({planned.layout(path) for path in paths}) > 1:
            layouts = ", ".join(f"{path}: {planned.layout(path) or 'not in the plan'}" for path in paths)
            yield Finding("error", paths[0], f"tied weights laid out differently ({layouts})", "give them one layout")
