"""Whether a plan fits a model, found out before anything is changed; every finding is reported at once.

Nothing here needs torch: a model is read through ``named_modules``, its parameters' shapes and its attributes,
so one on the meta device serves, and so does anything that answers alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tp_plans.errors import CheckFailedError
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
        do not divide (with those that would), tied weights that would be untied.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    matched = {path: plan.match(path) for path in modules}
    findings = [
        *_unmatched_patterns(plan, matched),
        *_matched_twice(matched),
        *_unsuited(plan, matched, modules),
        *_indivisible(plan, matched, modules, tp),
        *_untied(plan, matched, modules),
    ]
    return Report(plan, tp, tuple(findings))


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
        if owner := next((path for path in matched if prefix.match(path)), None):
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
            yield Finding("error", path, f"{kind} has {shape}, not two dims", f"{type(style).__name__} splits matrices")
        elif isinstance(style, VocabParallelEmbedding) and getattr(modules[path], "max_norm", None) is not None:
            yield Finding(
                "error",
                path,
                "max_norm renormalises rows in place, on one rank only",
                "build the embedding without it",
            )


def _indivisible(
    plan: Plan, matched: Mapping[str, list[str]], modules: Mapping[str, Any], tp: int
) -> Iterator[Finding]:
    for path, style in _styled(plan, matched):
        weight = modules[path]._parameters.get("weight")
        if weight is None or weight.ndim != 2:
            continue
        size = weight.shape[1 if isinstance(style, RowwiseParallel) else 0]
        if isinstance(style, (ColwiseParallel, RowwiseParallel)) and style.unit != 1:
            yield from _uneven_units(path, size, _unit(style.unit, path, modules), tp)
        elif isinstance(style, (ColwiseParallel, RowwiseParallel, VocabParallelEmbedding)):
            yield from _empty_shard(path, size, tp)


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


def _uneven_units(path: str, size: int, unit: int | Finding, tp: int) -> Iterator[Finding]:
    if isinstance(unit, Finding):
        yield unit
        return
    units, rest = divmod(size, unit)
    if rest or units % tp:
        what = f"{units} heads of {unit} ({size} features) cannot be split over tp={tp}"
        legal = ", ".join(str(n) for n in range(1, units + 1) if units % n == 0)
        yield Finding("error", path, what, f"use a tp out of {legal}")


def _unit(unit: int | str, path: str, modules: Mapping[str, Any]) -> int | Finding:
    if isinstance(unit, int):
        return unit
    parent = path.rpartition(".")[0]
    value = getattr(modules[parent], unit, None)
    if isinstance(value, int):
        return value
    return Finding(
        "error", path, f"its unit is {unit!r}, but {parent} has no such integer", "give the unit as a number"
    )


def _untied(plan: Plan, matched: Mapping[str, list[str]], modules: Mapping[str, Any]) -> Iterator[Finding]:
    owners: dict[int, list[tuple[str, Layout | None]]] = defaultdict(list)
    for path, module in modules.items():
        style = plan[matched[path][0]] if matched[path] else None
        for name, parameter in module._parameters.items():
            if parameter is not None:
                layout = parameter_layout(style, parameter.ndim)
                owners[id(parameter)].append((f"{path}.{name}", layout))
    for places in owners.values():
        if len({layout for _, layout in places}) > 1:
            told = ", ".join(f"{path}: {layout or 'not in the plan'}" for path, layout in places)
            yield Finding("error", places[0][0], f"tied weights laid out differently ({told})", "give them one layout")


def _styled(plan: Plan, matched: Mapping[str, list[str]]) -> Iterator[tuple[str, Style]]:
    for path, patterns in matched.items():
        if patterns:
            yield path, plan[patterns[0]]
