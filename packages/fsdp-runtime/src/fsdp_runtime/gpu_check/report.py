"""One Markdown page of all findings."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_runtime.gpu_check.check_result import CheckResult


def markdown(findings: Sequence[CheckResult]) -> str:
    """Return the page: a verdict, then a table for each section in the order of the findings."""
    lines = ["# fsdp-runtime on this machine", "", verdict(findings), ""]
    for section in dict.fromkeys(finding.section for finding in findings):
        lines += [f"## {section}", "", "| what | found | bound | |", "|---|---|---|---|"]
        for finding in findings:
            if finding.section == section:
                state = "" if finding.state == "measured" else finding.state
                cells = (finding.what, finding.figure, finding.bound, state)
                lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def verdict(findings: Sequence[CheckResult]) -> str:
    """Return the counts of findings by state."""
    count = {state: sum(f.state == state for f in findings) for state in ("passed", "failed", "not run")}
    return f"{count['passed']} checks passed, {count['failed']} failed, {count['not run']} were not run."
