"""The findings of checks, and one Markdown page of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fsdp_runtime.dry_run.report.sections import markdown_table

#: The meaning of a section's figures on the page.
MEANINGS = {
    "Parity": "Loss and gradients of one step: the largest difference from one process, or from documents alone.",
    "Training": "Losses and norms of a run: the largest relative difference from one process.",
    "Routes": "The share of other routes; the largest difference of gradients from one process.",
    "Host waits": "Calls of a step that wait for the device, and their places.",
    "Levers": "Peak and time of a step beside the step without the lever.",
    "Float8": "A block of Qwen3-8B: both passes, their speed and peak, and the largest difference, beside bfloat16.",
    "Kernels": "The largest difference between Triton's kernels and torch's operators.",
}


@dataclass(frozen=True)
class CheckResult:
    """The finding of one check."""

    section: str  # the heading above it
    what: str  # the setting, such as ``"LlamaForCausalLM, tp=2, float32"``
    figure: str  # the measured value, with its unit
    bound: str = ""  # the expected bound; empty without an expectation
    # ``"failed"`` if the figure is out of its bound or the check raised; ``"not run"`` says why in ``figure``
    state: Literal["passed", "failed", "measured", "not run"] = "measured"


def largest(values: Iterable[float]) -> float:
    """Return the largest value, infinity for NaN, which ``max`` may lose."""
    return max(value if value == value else float("inf") for value in values)


def within(section: str, what: str, value: float, bound: float, unit: str = "") -> CheckResult:
    """Return a finding that passes if ``value`` is at most ``bound``."""
    return judged(section, what, f"{value:.2g}{unit}", f"at most {bound:.2g}{unit}", value <= bound)  # NaN fails


def judged(section: str, what: str, figure: str, bound: str, passed: bool) -> CheckResult:
    """Return a finding with its verdict."""
    return CheckResult(section, what, figure, bound, "passed" if passed else "failed")


def markdown(findings: Sequence[CheckResult], seconds: float | None = None) -> str:
    """Return the page: a verdict and the failures, then a table for each section in the order of the findings."""
    took = "" if seconds is None else f" It took {seconds:.0f} s."
    lines = ["# fsdp-runtime on this machine", "", verdict(findings) + took, ""]
    lines += [f"- **failed**: {f.section}: {f.what}: {f.figure}, {f.bound}" for f in findings if f.state == "failed"]
    lines += [""] if len(lines) > 4 else []
    states = ("passed", "failed", "measured", "not run")
    totals, tables = [["section", *states]], list[str]()
    for section in dict.fromkeys(finding.section for finding in findings):
        within_section = [finding for finding in findings if finding.section == section]
        totals.append([section, *(str(sum(f.state == state for f in within_section)) for state in states)])
        cells = ((f.what, f.figure, f.bound, f.state.replace("measured", "")) for f in within_section)
        table = markdown_table([("what", "found", "bound", ""), *cells], left=4)
        tables += [f"## {section}", "", MEANINGS.get(section, ""), "", *table, ""]
    return "\n".join([*lines, *markdown_table(totals, left=1), "", *tables])


def verdict(findings: Sequence[CheckResult]) -> str:
    """Return the counts of findings by state."""
    count = {state: sum(f.state == state for f in findings) for state in ("passed", "failed", "not run")}
    return f"{count['passed']} checks passed, {count['failed']} failed, {count['not run']} were not run."
