"""Check rules of the axis ``ep``: what they match, and that the experts divide."""

from __future__ import annotations

from collections.abc import Iterator

from tp_plans.checks.findings import Finding
from tp_plans.planned_tree import PlannedTree
from tp_plans.styles import DispatchExperts


def check_dispatched(planned: PlannedTree, ep: int) -> Iterator[Finding]:
    """Modules that cannot be dispatched: without stacked experts, tied, or with experts that do not divide."""
    tied = {path for group in planned.tree.tied for path in group}
    for path, style in planned.styled_modules():
        if not isinstance(style, DispatchExperts):
            continue
        parameters = planned.tree.own_parameters(path)
        stacks = {name: int(each.shape[0]) for name, each in parameters.items() if each.ndim == 3}
        if not stacks:
            shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in parameters.items()) or "none"
            kind = type(planned.modules[path]).__name__
            what = f"{kind} has no stacked experts [experts, in, out]; its parameters: {shapes}"
            yield Finding("error", path, what, "let DispatchExperts match a module that holds stacked experts")
            continue
        if shared := [name for name in parameters if f"{path}.{name}" in tied]:
            what = f"{', '.join(shared)} is tied to another module, and only this one's tokens would be sent to it"
            yield Finding("error", path, what, "untie it, or leave it out of the rules of the axis ep")
        experts = min(stacks.values())
        if experts % ep:
            legal = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
            yield Finding(
                "error", path, f"{experts} experts cannot be divided over ep={ep}", f"use an ep out of {legal}"
            )
