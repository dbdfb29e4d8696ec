"""One line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckResult:
    """What one check found."""

    section: str  # the heading that it stands under
    what: str  # the setting, such as ``"LlamaForCausalLM, tp=2, float32"``
    figure: str  # what was measured, with its unit
    bound: str = ""  # what it was compared with; empty if nothing is expected
    # ``"failed"`` if the figure is out of its bound or the check raised; ``"not run"`` says why in ``figure``
    state: Literal["passed", "failed", "measured", "not run"] = "measured"


def within(section: str, what: str, value: float, bound: float, unit: str = "") -> CheckResult:
    """Return a finding that passes if ``value`` is at most ``bound``."""
    state: Literal["passed", "failed"] = "passed" if value <= bound else "failed"  # NaN fails
    return CheckResult(section, what, f"{value:.2g}{unit}", f"at most {bound:.2g}{unit}", state)
