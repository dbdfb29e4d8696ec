"""Write docs/compatibility.md from reports of test runs: ``compatibility.py RUN.xml ...``.

A report is what ``pytest --junitxml=RUN.xml`` writes; the tests' plugin puts the versions and the commit into it.
Every run is kept in docs/compatibility.json until a later one on the same versions takes its place.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

DOCS = Path(__file__).parents[1]
ENVIRONMENTS = DOCS / "environments.json"
OF_TRAINERS = (
    "What other projects' releases require, and the packages of this repository that fit there without a change of a "
    "version. `tp-plans` requires neither torch nor transformers; the other two take torch 2.11 to 2.15, and weights "
    "are read from transformers 5.10 on. "
    "What fits here is what the requirements allow: the table above says which versions tests ran on."
)
ABOUT = (
    "See which versions the tests ran on, each time on Linux with CPU ranks only. A row is one run of one commit. "
    "Later commits may have fixed its failures.\n\n"
    "- *all* is every test, *subset* chosen ones (`nox -s torch_subset versions`).\n"
    "- Rows with a release of TRL are those of `nox -s versions`: each trainer on one mesh.\n"
    "- The row of transformers 5.10.4 is that of `nox -s verl`: verl 0.9.1, the newest release, takes transformers "
    "below 5.11. The sources of 0.10.0.dev of 22 August 2026 have the same signatures of what is used.\n"
    "- Plans take models of transformers 4.57 too. Weights are read, written and streamed from 5.10 on, and an older "
    "release is refused by name. Three tests fail on 4.57: its SigLIP reshapes to the full width, so that a sharded "
    'tower of Gemma 3 raises; `TensorParallel(towers="replicated")` runs.\n'
    "- Skipped tests need a class that an older transformers lacks.\n\n"
    "`docs/generate/compatibility.py` writes this page from the reports that pytest left."
)


@dataclass(frozen=True)
class Run:
    """What one report says: where the tests ran, which, and how they ended."""

    torch: str
    python: str
    transformers: str
    tests: str
    passed: int
    failed: int
    skipped: int
    date: str
    commit: str
    trl: str = "none"

    @property
    def place(self) -> tuple[tuple[int, ...], ...]:
        """The versions as numbers, oldest first."""
        return tuple(_numbers(version) for version in (self.torch, self.python, self.transformers, self.trl))


def read_report(path: Path) -> Run:
    """The run that a report tells of.

    Raises:
        ValueError: the report names no versions: the tests' plugin was not loaded.
    """
    suite = ElementTree.parse(path).getroot().find("testsuite")
    if suite is None:
        raise ValueError(f"{path} has no test suite: give what pytest --junitxml writes")
    said = {each.get("name"): each.get("value", "") for each in suite.iterfind("properties/property")}
    wanted = ("torch", "python", "transformers", "tests", "commit")
    if missing := [name for name in wanted if name not in said]:
        raise ValueError(f"{path} does not say {', '.join(missing)}: run pytest at the root of the repository")
    number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    return Run(
        **{name: said[name] for name in wanted},
        passed=number["tests"] - failed - number["skipped"],
        failed=failed,
        skipped=number["skipped"],
        date=suite.get("timestamp", "")[:10],
        trl=said.get("trl", "none"),
    )


def merged(known: Iterable[Run], new: Iterable[Run]) -> list[Run]:
    """One run for each set of versions and tests, the last one given, in order of the versions."""
    runs = {(run.place, run.tests): run for run in (*known, *new)}
    return sorted(runs.values(), key=lambda run: (run.place, run.tests))


def page(runs: Iterable[Run]) -> str:
    """The page in Markdown."""
    trainers = [
        f"| {each['project']} | {each['stated']} | {each['torch']} | {each['transformers']} "
        f"| {', '.join(each['fits'])} |"
        for each in json.loads(ENVIRONMENTS.read_text())
    ]
    rows = [
        f"| {run.torch} | {run.python} | {run.transformers} | {'' if run.trl == 'none' else run.trl} | {run.tests} "
        f"| {run.passed} | {run.failed} | {run.skipped} | {run.date} | {run.commit} |"
        for run in runs
    ]
    head = "| torch | Python | transformers | TRL | tests | passed | failed | skipped | date | commit |"
    of_trainers = "| project | stated by | torch | transformers | fits |"
    return "\n".join(
        [
            *("# Compatibility", "", ABOUT, "", head, "|---" * 10 + "|", *rows, ""),
            *("## Environments of other trainers", "", OF_TRAINERS, "", of_trainers, "|---" * 5 + "|", *trainers, ""),
        ]
    )


def main() -> None:
    """Take reports over, and write the data and the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", nargs="*", type=Path, help="files of pytest --junitxml; none to write the page only")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of compatibility.json and .md")
    options = parser.parse_args()
    data = options.docs / "compatibility.json"
    known = [Run(**run) for run in json.loads(data.read_text())] if data.exists() else []
    runs = merged(known, [read_report(report) for report in options.reports])
    data.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    (options.docs / "compatibility.md").write_text(page(runs))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


if __name__ == "__main__":
    main()
