"""A plan as users write it, with style words: what can be read of it, and what cannot."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from tp_plans.checks.findings import Finding
from tp_plans.errors import PlanError, UnknownStyleError
from tp_plans.hugging_face import STYLE_BY_NAME, style_from_name
from tp_plans.plan import Plan, require_plan
from tp_plans.styles import Style


def parse_plan(rules: object) -> tuple[Plan, list[Finding]]:
    """A plan of the rules that can be read, and a finding for each of the others.

    Raises:
        PlanError: the rules are no mapping.
    """
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
