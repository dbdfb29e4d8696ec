"""An explanation, as data and as text, and the placements of parameters in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from tp_plans.checks.replicated import size_of
from tp_plans.explanation.collectives import CollectiveSummary
from tp_plans.layouts import Layout, Replicate, Shard, shard_ranges
from tp_plans.model_tree import join
from tp_plans.naming import leaf
from tp_plans.patterns import wildcard
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree
from tp_plans.styles import GatheredParameters, Style, style_to_dict
from tp_plans.text import format_bytes, short_repr


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter of a model."""

    path: str
    shape: tuple[int, ...]  # of the full tensor
    local_shape: tuple[int, ...]  # the first rank's shape; later ranks store as much or less
    layout: Layout | None  # on the axis; ``None`` where it stays a plain tensor, replicated
    size: int  # bytes of the full tensor

    @property
    def name(self) -> str:
        """The parameter's last name."""
        return leaf(self.path)


@dataclass(frozen=True)
class RuleExplanation:
    """The effect of one rule."""

    pattern: str
    style: Style
    places: tuple[str, ...]  # the modules that it matches, or the parameters for a bare parameter's rule
    parameters: tuple[ShardedParameter, ...]
    collectives: tuple[CollectiveSummary, ...]  # the collectives that they cause


@dataclass(frozen=True)
class Explanation:
    """The effect of a plan on a model."""

    plan: Plan
    tp: int  # the size of the axis
    rules: tuple[RuleExplanation, ...]
    rest: tuple[ShardedParameter, ...]  # the parameters without a rule, which are replicated
    ep: int = 1  # the size of the axis of experts

    @property
    def parameters(self) -> tuple[ShardedParameter, ...]:
        """All parameters; a tied one at each of its places."""
        return (*(parameter for rule in self.rules for parameter in rule.parameters), *self.rest)

    @property
    def sharded_share(self) -> float:
        """The share of the parameters' bytes that is split over the axis."""
        total = sum(parameter.size for parameter in self.parameters)
        split = sum(parameter.size for parameter in self.parameters if isinstance(parameter.layout, Shard))
        return split / total if total else 0.0

    def collectives(self, when: str) -> dict[str, int]:
        """Return the number of collectives of each kind in a ``"forward"`` or ``"backward"`` pass."""
        counts: Counter[str] = Counter()
        for collective in chain.from_iterable(rule.collectives for rule in self.rules):
            if collective.when == when:
                counts[collective.kind] += collective.count
        return dict(sorted(counts.items()))

    def to_dict(self) -> dict[str, Any]:
        """The explanation as JSON-ready data."""
        return {
            "plan": self.plan.name,
            "tp": self.tp,
            "ep": self.ep,
            "sequence_parallel": self.plan.sequence_parallel,
            "sharded_share": self.sharded_share,
            "collectives": {when: self.collectives(when) for when in ("forward", "backward")},
            "rules": [
                {
                    "pattern": rule.pattern,
                    "rule": style_to_dict(rule.style),
                    "places": list(rule.places),
                    "parameters": [_parameter_to_dict(parameter) for parameter in rule.parameters],
                    "collectives": [asdict(collective) for collective in rule.collectives],
                }
                for rule in self.rules
            ],
            "rest": [_parameter_to_dict(parameter) for parameter in self.rest],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        total = sum(parameter.size for parameter in self.parameters)
        axes = f"tp={self.tp}" + f", ep={self.ep}" * (self.ep > 1)
        yield f"{self.plan!r} over {axes}: {self.sharded_share:.1%} of {format_bytes(total)} split"
        for when in ("forward", "backward"):
            counts = ", ".join(f"{count} {kind}" for kind, count in self.collectives(when).items())
            yield f"  {when}: {counts or 'nothing is sent'}"
        for rule in self.rules:
            count = f"{len(rule.places)} place{'s' * (len(rule.places) != 1)}"
            yield f"{rule.pattern or '(top)'}: {short_repr(rule.style)}, {count}"
            yield from (f"  {line}" for line in _grouped(rule.parameters))
            yield from (f"  {collective}" for collective in rule.collectives)
        if self.rest:
            yield "without a rule, replicated"
            yield from (f"  {line}" for line in _grouped(self.rest, full=True))


def sharded_parameters(path: str, planned: PlannedTree, tp: int) -> Iterator[ShardedParameter]:
    """A parameter, or the parameters of a module without separate rules."""
    if path in planned.parameters:
        yield _sharded(path, planned, tp)
        return
    style = planned.own_style(path)
    below = style.names if isinstance(style, GatheredParameters) else ()
    for name in dict.fromkeys((*planned.tree.own_parameters(path), *below)):
        parameter = join(path, name)
        if parameter in planned.parameters and not planned.rules[parameter]:
            yield _sharded(parameter, planned, tp)


def _sharded(path: str, planned: PlannedTree, tp: int) -> ShardedParameter:
    parameter, layout = planned.parameters[path], planned.layout(path)
    shape = tuple(map(int, parameter.shape))
    local = list(shape)
    if isinstance(layout, Shard) and -len(shape) <= layout.dim < len(shape):
        local[layout.dim] = len(shard_ranges(shape[layout.dim], tp)[0])
    elif layout is not None and not isinstance(layout, Shard):
        layout = Replicate()
    return ShardedParameter(path, shape, tuple(local), layout, size_of(parameter))


def _grouped(parameters: Sequence[ShardedParameter], *, full: bool = False) -> Iterator[str]:
    """A line for the parameters that differ in their block only."""
    counts: Counter[str] = Counter()
    for parameter in parameters:
        name = wildcard(parameter.path) if full else parameter.name
        shape = f"{list(parameter.shape)}"
        if parameter.local_shape != parameter.shape:
            shape += f" -> {list(parameter.local_shape)}"
        counts[f"{name} {shape}{'' if parameter.layout is None else f', {parameter.layout}'}"] += 1
    for line, count in counts.items():
        yield line + f" (x {count})" * (count > 1)


def _parameter_to_dict(parameter: ShardedParameter) -> dict[str, Any]:
    return {
        "path": parameter.path,
        "shape": list(parameter.shape),
        "local_shape": list(parameter.local_shape),
        "layout": None if parameter.layout is None else str(parameter.layout),
        "bytes": parameter.size,
    }
