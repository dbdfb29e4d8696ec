"""The sizes that a plan shards over the axis, and whether they divide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tp_plans import styles
from tp_plans._validate import is_integer
from tp_plans.checks.findings import Finding
from tp_plans.layouts import Shard
from tp_plans.model_tree import join, parent
from tp_plans.module_attrs import getattr_path, key_value_heads
from tp_plans.planned_tree import PlannedTree

#: The largest axis that is tried if nothing in a plan bounds it.
MAX_TP = 1024


@dataclass(frozen=True)
class Constraint:
    """A size that the plan divides among the ranks."""

    where: str  # the module, parameter or attribute
    size: int  # how many there are
    noun: str = "features"  # the counted things
    unit: int = 1  # how many stay together
    even: bool = False  # whether every rank must get as many as the others
    shared: bool = False  # whether, where there are fewer units than ranks, several may have the same

    def fits(self, tp: int) -> bool:
        """Return whether every rank of an axis gets a part; a size of 0 (experts of width 0) fits any axis."""
        if self.size == 0:
            return True
        units = self.size // self.unit
        if self.even:
            return units % tp == 0 or (self.shared and tp % units == 0)
        return -(-self.size // tp) * (tp - 1) < self.size

    def finding(self, tp: int) -> Finding:
        """Return the finding for a size of the axis that does not fit."""
        if not self.even:
            chunk = -(-self.size // tp)
            problem = f"{self.size} {self.noun} in chunks of {chunk} leave a rank of tp={tp} empty"
            return Finding("error", self.where, problem, "use a smaller tp")
        units = self.size // self.unit
        heads = f"{units} heads of {self.unit} ({self.size} {self.noun})" if self.unit > 1 else f"{units} {self.noun}"
        legal = ", ".join(str(n) for n in range(1, units + 1) if units % n == 0)
        more = f", or a multiple of {units}" * self.shared
        return Finding("error", self.where, f"{heads} cannot be split over tp={tp}", f"use a tp out of {legal}{more}")


def valid_tp_sizes(cuts: Sequence[Constraint]) -> tuple[int, ...]:
    """Return the sizes of the axis, up to :data:`MAX_TP`, that fit all constraints; none without constraints."""
    distinct = {(cut.size, cut.unit, cut.even, cut.shared): cut for cut in cuts}.values()
    bounds = [cut.size // cut.unit if cut.even else cut.size for cut in distinct if cut.size and not cut.shared]
    largest = min([MAX_TP, *bounds]) if distinct else 0
    return tuple(tp for tp in range(1, largest + 1) if all(cut.fits(tp) for cut in distinct))


def divisibility_constraints(planned: PlannedTree) -> tuple[list[Constraint], list[Finding]]:
    """Return the sizes that the plan shards over the axis, and findings for numbers that the model lacks."""
    cuts: list[Constraint] = []
    findings: list[Finding] = []
    for path in planned.styles:
        for constraint in _constraints(path, planned):
            (cuts if isinstance(constraint, Constraint) else findings).append(constraint)  # type: ignore[arg-type]
    return cuts, findings


def _constraints(path: str, planned: PlannedTree) -> Iterator[Constraint | Finding]:
    match planned.own_style(path):
        case styles.ColwiseParallel(multiple_of=unit, fused_sizes=pieces, replicate_kv_heads=shared) if (
            weight := planned.tree.weight(path)
        ) is not None:
            yield from _weight_constraints(path, weight.shape[0], unit, pieces, planned, shared=shared)
        case styles.RowwiseParallel(multiple_of=unit, fused_sizes=pieces) if (
            weight := planned.tree.weight(path)
        ) is not None:
            yield from _weight_constraints(path, weight.shape[1], unit, pieces, planned)
        case styles.MLAKVProjection(rope_dim=rotary) if (weight := planned.tree.weight(path)) is not None:
            yield from _mla_constraints(path, weight.shape[0], rotary, planned)
        case styles.VocabParallelEmbedding() if (weight := planned.tree.weight(path)) is not None:
            yield Constraint(path, weight.shape[0], "entries")
        case styles.ColwiseEmbedding() if (weight := planned.tree.weight(path)) is not None:
            yield Constraint(path, weight.shape[1])
        case styles.ExpertsParallel():
            for each in list(planned.tree.own_parameters(path).values())[:1]:
                if each.ndim:
                    yield Constraint(path, each.shape[0], "experts")
        case styles.ParameterStyle(layout=Shard(dim=dim)):
            parameter = planned.parameters[path]
            if -parameter.ndim <= dim < parameter.ndim:
                yield Constraint(path, parameter.shape[dim], "entries")
        case styles.ParallelAttention() as style:
            yield from _count_constraints(path, style, planned)


def _weight_constraints(
    path: str, size: int, unit: int | str, pieces: tuple[int | str, ...], planned: PlannedTree, *, shared: bool = False
) -> Iterator[Constraint | Finding]:
    width = planned.number(path, unit)
    proportions = [planned.number(path, piece) for piece in pieces] or [1]
    missing = [name for name, number in zip((unit, *pieces), (width, *proportions), strict=False) if number is None]
    for name in dict.fromkeys(missing):
        yield _missing_attribute(path, name, "unit" if name == unit else "piece", planned)
    if missing:
        return
    known = [piece for piece in proportions if piece is not None]
    if size % sum(known):
        listed = f"({', '.join(map(str, pieces))}) = {tuple(known)}"
        problem = f"{size} features are not a multiple of {sum(known)}, the sum of its fused sizes {listed}"
        yield Finding("error", path, problem, "correct the pieces of the rule")
        return
    for piece in known:
        features = size // sum(known) * piece
        which = f" of the {size}" * (len(known) > 1)
        if width is not None and features % width:
            problem = f"{features} features{which} are not a multiple of {width} (multiple_of)"
            yield Finding("error", path, problem, f"correct the unit {unit!r} of the rule")
        else:
            yield Constraint(path, features, f"features{which}", width or 1, even=unit != 1 or shared, shared=shared)


def _mla_constraints(path: str, size: int, rotary: int | str, planned: PlannedTree) -> Iterator[Constraint | Finding]:
    width = planned.number(path, rotary, least=0)
    if width is None:
        yield _missing_attribute(path, rotary, "rotary key", planned)
    elif width >= size:
        problem = f"its rotary key takes {width} of {size} features, and leaves none for compressed keys and values"
        yield Finding("error", path, problem, f"correct the rotary key {rotary!r} of the rule")
    else:
        yield Constraint(path, size)


def _missing_attribute(path: str, name: int | str, problem: str, planned: PlannedTree) -> Finding:
    owner = type(planned.modules[parent(path)]).__name__
    message = f"its {problem} is {name!r}, but the {owner} above it has no positive integer of that name"
    return Finding("error", path, message, f"give the {problem} as a number")


def _count_constraints(
    path: str, style: styles.ParallelAttention, planned: PlannedTree
) -> Iterator[Constraint | Finding]:
    module = planned.modules[path]
    for name in style.head_count_attrs:
        count = getattr_path(module, name)
        if count is None:
            continue
        if is_integer(count, least=1):
            shared = "kv" in name or "key_value" in name
            shared = shared and any(_replicated_kv(path, planned))
            yield Constraint(path, count, f"of {name}", even=True, shared=shared)
        else:
            problem = f"its count {name!r} is {count!r}, no positive integer"
            yield Finding("error", join(path, name), problem, "leave it out of the rule's counts")


def check_kv_sharing(planned: PlannedTree, tp: int) -> Iterator[Finding]:
    """Find attention layers that share key/value heads between ranks but do not tell the heads' number."""
    for path in planned.styles:
        style = planned.own_style(path)
        if not isinstance(style, styles.ParallelAttention):
            continue
        module = planned.modules[path]
        if not is_integer(getattr_path(module, style.kv_groups_attr)) or key_value_heads(module, style) is not None:
            continue
        if any(_has_fewer_heads(projection, planned, tp) for projection in _replicated_kv(path, planned)):
            lacking = f"{style.kv_heads_attr!r}, which {type(module).__name__} does not have"
            problem = f"ranks of tp={tp} would share key/value heads, and its {style.kv_groups_attr!r} needs {lacking}"
            fix = "give the config that field, or the rule's kv_heads another attribute"
            yield Finding("error", path, problem, fix)


def _has_fewer_heads(path: str, planned: PlannedTree, tp: int) -> bool:
    style, weight = planned.style(path), planned.tree.weight(path)
    unit = planned.number(path, style.multiple_of) if isinstance(style, styles.ColwiseParallel) else None
    return weight is not None and unit is not None and int(weight.shape[0]) // unit < tp


def _replicated_kv(path: str, planned: PlannedTree) -> Iterator[str]:
    """Yield the projections of an attention layer with heads that ranks may share."""
    for child in planned.children[path]:
        style = planned.style(child)
        if isinstance(style, styles.ColwiseParallel) and style.replicate_kv_heads:
            yield child
