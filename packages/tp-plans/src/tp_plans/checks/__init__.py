"""Whether a plan fits a model, found out before anything is changed; every finding is reported at once.

Nothing here needs torch: a model is read through ``named_modules``, its parameters' shapes and its attributes,
so one on the meta device serves, and so does anything that answers alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tp_plans.errors import CheckFailedError
from tp_plans.fields import is_integer
from tp_plans.layouts import Layout
from tp_plans.plan import Plan
from tp_plans.styles import (
    ColwiseParallel,
    PrepareInput,
    RowwiseParallel,
    Style,
    VocabParallelEmbedding,
    parameter_layout,
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or noteworthy.

    Args:
        severity: ``"error"`` where the model would fail or train wrongly, else ``"warning"``.
        where: the pattern or module path.
        message: what is wrong, with the numbers.
        fix: what to do about it.
    """

    severity: Literal["error", "warning"]
    where: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.where or '(top)'}: {self.message}; {self.fix}"


@dataclass(frozen=True)
class Report:
    """All findings of one check."""

    plan: Plan
    tp: int
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings under which the plan must not be applied."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def raise_on_error(self) -> None:
        """Raise :class:`CheckFailedError` listing every error, if there is one."""
        if self.errors:
            lines = "\n".join(f"  {finding}" for finding in self.errors)
            raise CheckFailedError(
                f"{self.plan.name} does not fit the model at tp={self.tp} ({len(self.errors)} errors):\n{lines}"
            )

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.plan.name} fits the model at tp={self.tp}"
        return "\n".join(map(str, self.findings))


def check(plan: Plan, model: Any, *, tp: int) -> Report:
    """Check a plan against a model without touching either.

    Args:
        plan: the plan.
        model: a ``torch.nn.Module`` on any device (meta is enough), or anything with its ``named_modules``.
        tp: the size of the tensor-parallel axis.

    Returns:
        The report: patterns that match nothing, modules matched twice, modules a style does not suit, sizes that
        do not divide (with those that would), tied weights that would be untied.  What is wrong with many modules
        of one rule alike is one finding.
    """
    if not is_integer(tp, least=1):
        return Report(plan, tp, (Finding("error", "", f"tp is {tp!r}", "give the axis's size, 1 or more"),))
    modules: dict[str, Any] = dict(model.named_modules())
    matched = {path: plan.match(path) for path in modules}
    findings = [
        *_unmatched_patterns(plan, matched),
        *_matched_twice(matched),
        *_unsuited(plan, matched, modules),
        *_indivisible(plan, matched, modules, tp),
        *_untied(plan, matched, modules),
    ]
    return Report(plan, tp, tuple(_once_a_rule(findings, matched)))


def _unmatched_patterns(plan: Plan, matched: Mapping[str, list[str]]) -> Iterator[Finding]:
    used = {pattern for patterns in matched.values() for pattern in patterns}
    for pattern in plan:
        if pattern not in used:
            yield Finding(
                "error",
                pattern,
                "the pattern matches no module",
                f"{_nearest_existing(pattern, matched)}; correct it, or remove it with override({{{pattern!r}: None}})",
            )


def _nearest_existing(pattern: str, matched: Mapping[str, list[str]]) -> str:
    """Which leading part of a pattern still matches, and what is there."""
    parts = pattern.split(".")
    for length in range(len(parts) - 1, -1, -1):
        prefix = Plan({".".join(parts[:length]): PrepareInput()})
        owner = next((path for path in matched if prefix.match(path)), None)
        if owner is not None:
            start = f"{owner}." if owner else ""
            children = [path[len(start) :] for path in matched if path.startswith(start) and path != owner]
            names = [child for child in children if "." not in child]
            return f"{owner or 'the model'} has {', '.join(names) or 'no submodules'}"
    return "the model is empty"


def _matched_twice(matched: Mapping[str, list[str]]) -> Iterator[Finding]:
    for path, patterns in matched.items():
        if len(patterns) > 1:
            yield Finding("error", path, f"matched by {len(patterns)} rules: {', '.join(patterns)}", "keep one of them")


def _unsuited(plan: Plan, matched: Mapping[str, list[str]], modules: Mapping[str, Any]) -> Iterator[Finding]:
    for path, style in _styled(plan, matched):
        if not isinstance(style, (ColwiseParallel, RowwiseParallel, VocabParallelEmbedding)):
            continue
        weight = modules[path]._parameters.get("weight")
        kind = type(modules[path]).__name__
        if weight is None or weight.ndim != 2:
            shape = "no weight" if weight is None else f"a weight of shape {list(weight.shape)}"
            needs = f"{kind} has {shape}, and {type(style).__name__} splits a matrix"
            yield Finding("error", path, needs, "let the rule match a linear or embedding layer")
        elif isinstance(style, VocabParallelEmbedding):
            yield from _unsuited_embedding(path, modules[path])


#: Options of ``nn.Embedding`` that need the ids or rows that other ranks hold.
_WHOLE_TABLE_OPTIONS = {
    "max_norm": "renormalises rows in place, on one rank only",
    "scale_grad_by_freq": "counts ids, of which each rank sees its own only",
    "sparse": "gives sparse gradients, which DTensor does not lay out",
}


def _unsuited_embedding(path: str, embedding: Any) -> Iterator[Finding]:
    for option, effect in _WHOLE_TABLE_OPTIONS.items():
        if getattr(embedding, option, None) not in (None, False):
            yield Finding("error", path, f"{option} {effect}", f"build the embedding without {option}")


def _indivisible(
    plan: Plan, matched: Mapping[str, list[str]], modules: Mapping[str, Any], tp: int
) -> Iterator[Finding]:
    for path, style in _styled(plan, matched):
        weight = modules[path]._parameters.get("weight")
        if weight is None or weight.ndim != 2:
            continue
        size = weight.shape[1 if isinstance(style, RowwiseParallel) else 0]
        match style:
            case ColwiseParallel(unit=1) | RowwiseParallel(unit=1) | VocabParallelEmbedding():
                yield from _empty_shard(path, size, tp)
            case ColwiseParallel(unit=unit) | RowwiseParallel(unit=unit):
                yield from _uneven_units(path, size, unit, modules[path.rpartition(".")[0]], tp)


def _empty_shard(path: str, size: int, tp: int) -> Iterator[Finding]:
    """Features that are no heads need not divide, but every rank must get some."""
    chunk = -(-size // tp)
    if chunk * (tp - 1) >= size:
        yield Finding(
            "error",
            path,
            f"{size} features in chunks of {chunk} leave a rank of tp={tp} empty",
            "use a smaller tp",
        )


def _uneven_units(path: str, size: int, unit: int | str, parent: Any, tp: int) -> Iterator[Finding]:
    width = getattr(parent, unit, None) if isinstance(unit, str) else unit
    if not is_integer(width, least=1):
        what = f"its unit is {unit!r}, but the {type(parent).__name__} above it has no positive integer of that name"
        yield Finding("error", path, what, "give the unit as a number")
        return
    units, rest = divmod(size, width)
    if rest:
        what = f"{size} features are no multiple of its unit of {width}"
        yield Finding("error", path, what, f"correct the unit {unit!r} of the rule")
    elif units % tp:
        what = f"{units} heads of {width} ({size} features) cannot be split over tp={tp}"
        legal = ", ".join(str(n) for n in range(1, units + 1) if units % n == 0)
        yield Finding("error", path, what, f"use a tp out of {legal}")


def _untied(plan: Plan, matched: Mapping[str, list[str]], modules: Mapping[str, Any]) -> Iterator[Finding]:
    owners: dict[int, list[tuple[str, Layout | None]]] = defaultdict(list)
    for path, module in modules.items():
        style = plan[matched[path][0]] if matched[path] else None
        for name, parameter in module._parameters.items():
            if parameter is not None:
                layout = parameter_layout(style, parameter.ndim)
                owners[id(parameter)].append((f"{path}.{name}" if path else name, layout))
    for places in owners.values():
        if len({layout for _, layout in places}) > 1:
            told = ", ".join(f"{path}: {layout or 'not in the plan'}" for path, layout in places)
            yield Finding("error", places[0][0], f"tied weights laid out differently ({told})", "give them one layout")


def _once_a_rule(findings: Iterable[Finding], matched: Mapping[str, list[str]]) -> Iterator[Finding]:
    """Findings that differ only in the module, of which one rule matches many, as one finding on the rule."""
    groups: dict[tuple[str, Finding], list[Finding]] = defaultdict(list)
    for finding in findings:
        rule = next(iter(matched.get(finding.where, ())), finding.where)
        groups[rule, replace(finding, where="")].append(finding)
    for (rule, _), group in groups.items():
        first = group[0]
        if len(group) == 1:
            yield first
        else:
            yield replace(first, where=rule, message=f"{first.message} ({len(group)} modules, first {first.where})")


def _styled(plan: Plan, matched: Mapping[str, list[str]]) -> Iterator[tuple[str, Style]]:
    for path, patterns in matched.items():
        if patterns:
            yield path, plan[patterns[0]]
