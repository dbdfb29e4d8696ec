"""Rules that torch cannot apply where they stand, group_by_parent onto the module above.

``parallelize_module`` hands a style one module and nothing else.  A rule for a bare parameter has no module of
its own, and one whose numbers are attributes of the module above cannot find them; both go to that module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from tp_plans.errors import PlanError
from tp_plans.module_attrs import needs_parent
from tp_plans.styles import ParameterStyle, Style


@dataclass
class ParentRules:
    """The rules that a module carries for its parameters and children, by name or pattern of it."""

    parameter_rules: dict[str, ParameterStyle] = field(default_factory=dict)
    children: dict[str, Style] = field(default_factory=dict)

    def key(self) -> Hashable:
        """What two modules with equal rules have in common."""
        return frozenset(self.parameter_rules.items()), frozenset(self.children.items())


def group_by_parent(rules: Mapping[str, Style]) -> dict[str, tuple[Style | None, ParentRules]]:
    """Return the rules by module pattern, each with those moved up to it; ``None`` for a module without a rule.

    Modules that carry others' rules come first, since such a rule may change numbers that their parents read.

    Raises:
        PlanError: such a rule stands for the model itself, which has nothing above.
    """
    owned: dict[str, ParentRules] = defaultdict(ParentRules)
    own: dict[str, Style] = {}
    for pattern, style in rules.items():
        owner, _, name = pattern.rpartition(".")
        if not pattern and (isinstance(style, ParameterStyle) or needs_parent(style)):
            raise PlanError(
                f"the rule '' is {style}, which belongs to a parameter or takes numbers from the module above, and "
                "stands for the model itself: name the parameter, or give the numbers"
            )
        if isinstance(style, ParameterStyle):
            owned[owner].parameter_rules[name] = style
        elif needs_parent(style):
            owned[owner].children[name] = style
        else:
            own[pattern] = style
    return {pattern: (own.get(pattern), owned.get(pattern, ParentRules())) for pattern in dict.fromkeys((*owned, *own))}
