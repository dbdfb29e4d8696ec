"""Give modules whose parameters are tied to those of others the rules of these."""

from __future__ import annotations

from collections.abc import Mapping

from tp_plans.model_tree import is_at_or_below, join
from tp_plans.planned_tree import PlannedTree, merge_per_block
from tp_plans.styles import Style


def tied_modules(planned: PlannedTree, root: str) -> Mapping[str, Style]:
    """Return rules for the modules without any that share their parameters with modules that have rules.

    An encoder and a decoder of the same weights (Diffusion Gemma) have one plan: a parameter has one layout, inside and
    outside of the language model alike.
    """
    rules: dict[str, Style] = {}
    for source, target in _tied_pairs(planned):
        for path, style in planned.styles.items():
            twin = join(target, path.removeprefix(source).removeprefix("."))
            known = twin in planned.modules or twin in planned.parameters
            if path != source and is_at_or_below(path, source) and known and planned.style(twin) is None:
                rules[twin] = style
    return merge_per_block(rules.items(), planned.tree)


def _tied_pairs(planned: PlannedTree) -> dict[tuple[str, str], None]:
    """Return the modules with rules and the modules without that have the same parameters below them."""
    found: dict[tuple[str, str], None] = {}
    for group in planned.tree.tied:
        with_layout = [path for path in group if planned.layout(path) is not None]
        for path in (path for path in group if planned.layout(path) is None):
            for other in with_layout[:1]:
                pair = _without_common_end(other, path)
                if all(each in planned.modules for each in pair):
                    found[pair] = None
    return found


def _without_common_end(one: str, other: str) -> tuple[str, str]:
    first, second = one.split("."), other.split(".")
    while first and second and first[-1] == second[-1]:
        first.pop()
        second.pop()
    return ".".join(first), ".".join(second)
