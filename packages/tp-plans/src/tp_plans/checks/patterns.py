"""The rules of a plan as users write them, and against the names in a model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from tp_plans.checks.findings import Finding
from tp_plans.errors import PlanError, UnknownStyleError
from tp_plans.model_tree import parent
from tp_plans.naming import leaf
from tp_plans.patterns import Patterns
from tp_plans.plan import Plan, require_plan
from tp_plans.planned_tree import PlannedTree
from tp_plans.styles import ParameterStyle, Style
from tp_plans.styles.words import STYLE_BY_NAME, style_from_name


def parse_plan(rules: object) -> tuple[Plan, list[Finding]]:
    """Return a plan of the readable rules, and a finding for each other rule."""
    rules = rules if isinstance(rules, Mapping) else require_plan(rules)
    read: dict[str, Style] = {}
    findings = []
    for pattern, value in rules.items():
        try:
            style = style_from_name(value, where=str(pattern)) if isinstance(value, str) else value
            read.update(Plan({pattern: style}))
        except UnknownStyleError:
            near = difflib.get_close_matches(str(value), STYLE_BY_NAME, n=1)
            fix = f"did you mean {near[0]!r}?" if near else f"known words are {', '.join(sorted(STYLE_BY_NAME))}"
            findings.append(Finding("error", str(pattern), f"unknown style word {value!r}", fix))
        except PlanError as error:
            findings.append(Finding("error", str(pattern), str(error), "correct the rule"))
    return Plan(read), findings


def check_matches(planned: PlannedTree) -> Iterator[Finding]:
    """Find patterns that match nothing in the model."""
    used = {pattern for patterns in planned.rules.values() for pattern in patterns}
    for pattern, style in planned.plan.items():
        if pattern not in used:
            kind = "parameter" if isinstance(style, ParameterStyle) else "module"
            fix = f"correct it, or remove it with override({{{pattern!r}: None}})"
            problem = f"the pattern matches no {kind}"
            yield Finding("error", pattern, problem, f"{_nearest_existing(pattern, kind, planned)}; {fix}")


def _nearest_existing(pattern: str, kind: str, planned: PlannedTree) -> str:
    """Describe the longest leading part of a pattern that matches, and the names below it."""
    parts = pattern.split(".")
    for length in range(len(parts) - 1, -1, -1):
        beginning = Patterns([".".join(parts[:length])])
        owner = next((path for path in planned.modules if beginning.match(path)), None)
        if owner is not None:
            start = f"{owner}." if owner else ""
            below = planned.modules if kind == "module" or length < len(parts) - 1 else planned.parameters
            children = [path[len(start) :] for path in below if path.startswith(start) and path != owner]
            names = [child for child in children if "." not in child]
            none = "no submodules" if below is planned.modules else "no own parameters"
            return f"{owner or 'the model'} has {', '.join(names) or none}"
    return "the model is empty"


def check_single_match(planned: PlannedTree) -> Iterator[Finding]:
    """Find modules and parameters with several rules."""
    for path, patterns in planned.rules.items():
        if len(patterns) > 1:
            yield Finding("error", path, f"matched by {len(patterns)} rules: {', '.join(patterns)}", "keep one of them")


def check_parent_patterns(planned: PlannedTree) -> Iterator[Finding]:
    """Find rules of bare parameters that cannot be folded onto their owner's rule, which has another pattern."""
    for path in planned.parameters:
        for pattern in planned.rules[path][:1]:
            owner = planned.rules[parent(path)]
            if owner and owner[0] != parent(pattern):
                problem = f"its rule begins {parent(pattern)!r}, but the rule of its module is {owner[0]!r}"
                yield Finding("error", path, problem, f"write it as {owner[0] + '.' + leaf(path)!r}")
