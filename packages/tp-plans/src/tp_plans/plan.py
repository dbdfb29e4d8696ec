"""The plan: an immutable mapping from module-path pattern to style."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from tp_plans.errors import PlanError
from tp_plans.styles import Style, style_from_dict, style_to_dict

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

FORMAT = 1


class Plan(Mapping[str, Style]):
    """Which module of a model is split how, as data.

    A key is a dotted module path in which each part may be a shell-style pattern that stands for exactly one
    part: ``model.layers.*.mlp.up_proj`` means that layer of every block.

    Args:
        rules: pattern to style.
        name: what the plan is for, used in messages.
        sequence_parallel: whether activations between blocks are cut on the sequence.

    Raises:
        PlanError: a key is no module path, or a value is no style.
    """

    def __init__(self, rules: Mapping[str, Style], *, name: str = "custom", sequence_parallel: bool = False) -> None:
        for pattern, style in rules.items():
            _require_module_path(pattern)
            if not isinstance(style, Style):
                raise PlanError(f"the rule for {pattern!r} is {style!r}, which is no style of tp_plans")
        self._rules = dict(rules)
        self.name = name
        self.sequence_parallel = sequence_parallel

    def __getitem__(self, pattern: str) -> Style:
        return self._rules[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return hash((self.sequence_parallel, frozenset(self._rules.items())))

    def __eq__(self, other: object) -> bool:
        """Two plans are equal when they say the same; their names do not count."""
        if not isinstance(other, Plan):
            return NotImplemented
        return self.sequence_parallel == other.sequence_parallel and dict(self._rules) == dict(other._rules)

    def __repr__(self) -> str:
        kind = "TP + SP" if self.sequence_parallel else "TP"
        return f"<Plan {self.name}: {kind}, {len(self)} rules>"

    def override(self, rules: Mapping[str, Style | None]) -> Plan:
        """A plan with some rules replaced or added; ``None`` removes one.

        Raises:
            PlanError: a rule to remove is not in the plan.
        """
        merged: dict[str, Style] = dict(self._rules)
        for pattern, style in rules.items():
            if style is not None:
                merged[pattern] = style
            elif merged.pop(pattern, None) is None:
                raise PlanError(
                    f"cannot remove {pattern!r}: the plan {self.name} has no such rule; it has {', '.join(self)}"
                )
        return self._with(merged)

    def with_prefix(self, prefix: str) -> Plan:
        """The same plan for a model that sits at ``prefix`` inside another, as ``"model.language_model"``."""
        _require_module_path(prefix)
        return self._with({f"{prefix}.{pattern}" if pattern else prefix: s for pattern, s in self.items()})

    def match(self, path: str) -> list[str]:
        """The patterns that a module path matches; more than one is a mistake in the plan."""
        parts = path.split(".") if path else []
        return [pattern for pattern in self if _matches(pattern, parts)]

    def to_json(self, *, indent: int | None = 2) -> str:
        """The plan as JSON text, which :meth:`from_json` reads back to an equal plan."""
        data = {
            "format": FORMAT,
            "name": self.name,
            "sequence_parallel": self.sequence_parallel,
            "rules": {pattern: style_to_dict(style) for pattern, style in self.items()},
        }
        return json.dumps(data, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from what :meth:`to_json` wrote.

        Raises:
            PlanError: the text is not JSON, of another format, repeats a pattern, or holds an unknown style.
        """
        try:
            data = json.loads(text, object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            raise PlanError(f"not JSON: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("rules"), dict):
            raise PlanError("a plan in JSON is an object with an object 'rules' of pattern to style")
        if data.get("format") != FORMAT:
            raise PlanError(f"plan format {data.get('format')!r}: this release reads format {FORMAT}")
        rules: dict[str, Style] = {}
        for pattern, style in data["rules"].items():
            if not isinstance(style, dict):
                raise PlanError(f"the rule for {pattern!r} is {style!r}: write an object with a 'style'")
            rules[pattern] = style_from_dict(style)
        return cls(
            rules,
            name=str(data.get("name", "custom")),
            sequence_parallel=bool(data.get("sequence_parallel", False)),
        )

    def to_torch(self) -> dict[str, ParallelStyle]:
        """The plan for ``torch.distributed.tensor.parallel.parallelize_module`` (imports torch).

        Tied parameters stay one parameter as long as the plan cuts them alike, which ``tp_plans.check`` verifies.
        """
        from tp_plans.torch_styles import to_torch

        return to_torch(self)

    def _with(self, rules: Mapping[str, Style]) -> Plan:
        return Plan(rules, name=self.name, sequence_parallel=self.sequence_parallel)


def _matches(pattern: str, parts: list[str]) -> bool:
    expected = pattern.split(".") if pattern else []
    return len(expected) == len(parts) and all(map(fnmatchcase, parts, expected))


def _require_module_path(pattern: object) -> None:
    if not isinstance(pattern, str):
        raise PlanError(f"{pattern!r} is not a module path: write dotted names, as 'model.layers.*.mlp.up_proj'")
    if pattern and not all(part and not any(c.isspace() or c == "/" for c in part) for part in pattern.split(".")):
        raise PlanError(f"{pattern!r} is not a module path: write dotted names, as 'model.layers.*.mlp.up_proj'")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        raise PlanError(f"duplicate key {next(k for k in keys if keys.count(k) > 1)!r}: later ones would hide earlier")
    return data
