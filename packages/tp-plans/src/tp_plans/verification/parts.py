"""The parts of a model that a plan can be tried on one by one: sub-layers, embeddings, heads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tp_plans.layouts import Shard
from tp_plans.model_tree import ModelTree, ancestors, parent
from tp_plans.patterns import wildcard
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree
from tp_plans.styles import RowwiseParallel


def parts_of(plan: Plan, tree: ModelTree) -> Mapping[str, Plan]:
    """Return one plan for each part of a model, by the part's pattern."""
    # A part is a sub-layer of a block with all modules below it, the direct layers of a block, or a module outside the
    # blocks (all of a model without blocks). Modules with tied weights are one part. Modules without a rule in such a
    # plan are replicated, so that each plan is right or wrong alone. A sequence-parallel plan has no such parts.
    planned = PlannedTree(tree, plan)
    places: dict[str, str] = {}
    for path in planned.styles:
        owner = path if path in tree.modules else parent(path)
        places[path] = wildcard(_part(owner, tree))
    for group in tree.tied:
        tied = [places[owner] for path in group if (owner := parent(path)) in places]
        for path, place in places.items():
            if place in tied:
                places[path] = tied[0]
    places = _together(places, planned)
    rules: dict[str, dict[str, None]] = defaultdict(dict)
    for path, place in places.items():
        for pattern in planned.rules[path][:1]:
            rules[place][pattern] = None
    return {place: Plan({p: plan[p] for p in patterns}, name=plan.name) for place, patterns in rules.items()}


def _together(places: Mapping[str, str], planned: PlannedTree) -> dict[str, str]:
    """Return the places, with one part for a block's layers that output shards and separate layers that read them."""
    columns = {places[path] for path in places if planned.outputs_local_shard(path)}
    readers = ((path, style) for path, style in planned.styles.items() if isinstance(style, RowwiseParallel))
    rows = {places[path] for path, style in readers if style.input_layouts == Shard(-1)}
    partners = {row: next((c for c in columns - rows if parent(c) == parent(row)), row) for row in rows - columns}
    return {path: partners.get(place, place) for path, place in places.items()}


def part_of(parameter: str, tree: ModelTree) -> str:
    """Return the pattern of the part that a parameter belongs to."""
    return wildcard(_part(parent(parameter), tree))


def _part(path: str, tree: ModelTree) -> str:
    above = (path, *ancestors(path))
    block = next((module for module in above if module in tree.blocks), None)
    if block is None:
        return path if tree.blocks else ""
    if path == block:
        return path
    first = next(module for module in above if parent(module) == block)
    return first if tree.children[first] else block
