"""The plan: an immutable mapping from module-path pattern to style."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from tp_plans._validate import is_integer
from tp_plans.errors import PlanError, type_name
from tp_plans.model_tree import ModelTree
from tp_plans.patterns import Patterns
from tp_plans.styles import DispatchExperts, Style, style_from_dict, style_to_dict

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

FORMAT = 1
_FIELDS = ("format", "name", "sequence_parallel", "rules")


class Plan(Mapping[str, Style]):
    """Which module of a model is split how, as data.

    A key is a dotted module path.  Each part may be a shell-style pattern for exactly one
    part: ``model.layers.*.mlp.up_proj`` means that layer of every block.

    Args:
        rules: pattern to style.
        name: the model or class of the plan, used in messages.
        sequence_parallel: whether activations between blocks are cut on the sequence.

    Raises:
        PlanError: a key is no module path, a value is not a style, or another argument is of the wrong type.
    """

    def __init__(self, rules: Mapping[str, Style], *, name: str = "custom", sequence_parallel: bool = False) -> None:
        if not isinstance(rules, Mapping):
            raise PlanError(f"the rules of a plan are a mapping of pattern to style, not of type {type_name(rules)}")
        for pattern, style in rules.items():
            _require_module_path(pattern)
            if not isinstance(style, Style):
                raise PlanError(
                    f"the rule for {pattern!r} is of type {type_name(style)}, which is not a style of tp_plans: "
                    "write one, as ColwiseParallel()"
                )
        if not isinstance(name, str):
            raise PlanError(f"name is {name!r}: write a string")
        if not isinstance(sequence_parallel, bool):
            raise PlanError(f"sequence_parallel is {sequence_parallel!r}: write true or false")
        self._rules = dict(rules)
        self._name = name
        self._sequence_parallel = sequence_parallel

    @property
    def name(self) -> str:
        """The model or class of the plan."""
        return self._name

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between blocks are cut on the sequence."""
        return self._sequence_parallel

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
            PlanError: a rule to remove is not in the plan, or the rules are no mapping.
        """
        if not isinstance(rules, Mapping):
            raise PlanError(f"override takes a mapping of pattern to style or None, not of type {type_name(rules)}")
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
        if not prefix:
            return self
        return self._with({f"{prefix}.{pattern}" if pattern else prefix: s for pattern, s in self.items()})

    def on_axis(self, axis: Literal["tp", "ep"]) -> Plan:
        """The rules of one axis: ``"ep"`` for experts that are dispatched, ``"tp"`` for all others."""
        return self._with({p: s for p, s in self.items() if isinstance(s, DispatchExperts) == (axis == "ep")})

    def match(self, path: str) -> list[str]:
        """The patterns that a module path matches; more than one is a mistake in the plan."""
        return self._patterns.match(path)

    def to_json(self, *, indent: int | None = 2) -> str:
        """The plan as JSON text, which :meth:`from_json` reads back to an equal plan.

        Raises:
            PlanError: ``indent`` is not a number of spaces, at most 100, or ``None``.
        """
        if indent is not None and not (is_integer(indent, least=0) and indent <= 100):
            raise PlanError(f"indent={indent!r}: give 0 to 100 spaces, or None for one line")
        data = {
            "format": FORMAT,
            "name": self.name,
            "sequence_parallel": self.sequence_parallel,
            "rules": {pattern: style_to_dict(style) for pattern, style in self.items()},
        }
        return json.dumps(data, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from the text of :meth:`to_json`.

        Raises:
            PlanError: the text is not JSON, of another format, repeats a pattern, or holds an unknown style.
        """
        data = _parsed(text)
        if not isinstance(data, dict) or not isinstance(data.get("rules"), dict):
            raise PlanError("a plan in JSON is an object with an object 'rules' of pattern to style")
        if not is_integer(data.get("format")) or data["format"] != FORMAT:
            raise PlanError(f"plan format {data.get('format')!r}: this release reads format {FORMAT}")
        if unknown := sorted(set(data) - set(_FIELDS)):
            raise PlanError(f"a plan in JSON has no field {', '.join(unknown)}: its fields are {', '.join(_FIELDS)}")
        rules = {pattern: _rule_from_json(pattern, style) for pattern, style in data["rules"].items()}
        fields = {field: data[field] for field in ("name", "sequence_parallel") if field in data}
        return cls(rules, **fields)

    def by_path(self, model: Any) -> dict[str, Style]:
        """The style of each module and parameter of a model that a rule matches, by path; of several rules, the first.

        Raises:
            ModelError: ``model`` is not a model.
        """
        tree = ModelTree.of(model)
        matches = ((path, self.match(path)) for path in (*tree.modules, *tree.parameters))
        styles = {path: self[patterns[0]] for path, patterns in matches if patterns}
        return {p: s for p, s in styles.items() if p in tree.modules or not isinstance(s, DispatchExperts)}

    def to_torch(self, model: Any = None) -> dict[str, ParallelStyle]:
        """The plan for ``torch.distributed.tensor.parallel.parallelize_module`` (imports torch).

        Tied parameters stay one parameter if the plan shards them in the same way, which ``tp_plans.check`` verifies.

        Args:
            model: key the styles by the paths of this model's modules in place of patterns.  ``parallelize_module``
                then does not warn of layers without a match, and tells two patterns of one module from patterns of
                different modules.  The meta device is enough.

        Returns:
            Pattern or path to style; rules of bare parameters are folded onto the module that owns them.

        Raises:
            ImportError: torch is not installed; the extra ``tp-plans[torch]`` installs it.
            ModelError: ``model`` is not a model.

        Example:
            >>> import torch, tp_plans
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
            >>> plan = tp_plans.Plan({"0": tp_plans.ColwiseParallel(), "1": tp_plans.RowwiseParallel()})
            >>> sorted(plan.to_torch(model))
            ['0', '1']
        """
        try:
            from tp_plans.torch_styles import to_torch
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "torch":
                raise
            raise ImportError("Plan.to_torch needs torch: pip install 'tp-plans[torch]'", name="torch") from error
        return to_torch(self if model is None else self.by_path(model))

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns(self._rules)

    def _with(self, rules: Mapping[str, Style]) -> Plan:
        return Plan(rules, name=self.name, sequence_parallel=self.sequence_parallel)


def require_plan(value: object) -> Plan:
    """The value, which is a plan."""
    if not isinstance(value, Plan):
        raise PlanError(f"an object of type {type_name(value)} is not a plan: make one with plan_for(model)")
    return value


def _require_module_path(pattern: object) -> None:
    fix = "write dotted names, as 'model.layers.*.mlp.up_proj'"
    if isinstance(pattern, str):
        if pattern == "":
            return
        if "**" in pattern:
            fix = "a star stands for exactly one part: write one * for each"
        elif "\\" in pattern:
            fix = r"it has no \d, no regular expression: write a * for each part that varies"
        elif all(part and not re.search(r"[\s/]", part) for part in pattern.split(".")):
            return
    raise PlanError(f"{pattern!r} is not a module path: {fix}")


def _parsed(text: str | bytes) -> Any:
    if not isinstance(text, (str, bytes, bytearray)):
        raise PlanError(f"not JSON: a plan is read from text, not from an object of type {type_name(text)}")
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:  # also numbers that are too long, and bytes that are no text
        raise PlanError(f"not JSON: {error}") from error


def _rule_from_json(pattern: str, style: object) -> Style:
    if not isinstance(style, dict):
        raise PlanError(f"the rule for {pattern!r} is {style!r}: write an object with a 'style'")
    try:
        return style_from_dict(style)
    except PlanError as error:
        raise type(error)(f"the rule for {pattern!r}: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        raise PlanError(f"duplicate key {next(k for k in keys if keys.count(k) > 1)!r}: later ones would hide earlier")
    return data
