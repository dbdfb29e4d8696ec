"""The compatibility table says what pytest's reports say, and keeps the last run on each set of versions."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from docs.generate.compatibility import DOCS, ENVIRONMENTS, Run, merged, page, read_report
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
def test_right(): pass
def test_wrong(): assert 0
@pytest.fixture
def broken(): raise OSError
def test_broken(broken): pass
def test_skipped(): pytest.skip("not here")
"""


def _report(folder: Path) -> Path:
    """The report of a real run of four tests, with the plugin of this repository."""
    (folder / "test_four.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml", "-q"]
    subprocess.run([*command, "--junitxml=run.xml", "test_four.py"], cwd=folder, capture_output=True)
    return folder / "run.xml"


def test_a_report_has_versions_and_counts(tmp_path: Path) -> None:
    run = read_report(_report(tmp_path))
    assert (run.passed, run.failed, run.skipped, run.tests) == (1, 2, 1, "subset")
    assert run.python == ".".join(map(str, sys.version_info[:3]))
    assert run.place[0] >= (2, 11)


def test_a_report_without_versions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.xml"
    path.write_text('<testsuites><testsuite tests="3"/></testsuites>')
    with pytest.raises(ValueError, match="does not say torch, python, transformers, tests, commit"):
        read_report(path)


RUN = Run("2.9.1", "3.11.7", "5.0.0", "all", passed=3, failed=0, skipped=0, date="2026-01-02", commit="abc")


def test_compatibility_page_counts_the_last_run_and_orders_versions_as_numbers() -> None:
    newer, again = replace(RUN, torch="2.10.0"), replace(RUN, failed=1)
    runs = merged([newer, RUN], [again])
    assert runs == [again, newer]


def test_every_run_is_a_row() -> None:
    rows = page([RUN, replace(RUN, tests="subset", failed=2)]).splitlines()
    assert "| 2.9.1 | 3.11.7 | 5.0.0 |  | all | 3 | 0 | 0 | 2026-01-02 | abc |" in rows
    assert "| 2.9.1 | 3.11.7 | 5.0.0 |  | subset | 3 | 2 | 0 | 2026-01-02 | abc |" in rows


def test_the_page_is_written_from_the_kept_runs() -> None:
    kept = [Run(**each) for each in json.loads((DOCS / "compatibility.json").read_text())]
    assert (DOCS / "compatibility.md").read_text() == page(kept)


def _required(package: str, name: str) -> SpecifierSet:
    """What a package requires of another one, itself or in its extra of that name."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *project.get("optional-dependencies", {}).get("transformers", [])]
    found = [each.specifier for each in map(Requirement, stated) if each.name == name]
    return found[0] if found else SpecifierSet()


def test_environments_of_other_trainers_hold_what_the_page_says() -> None:
    torch = [f"2.{minor}.{patch}" for minor in range(6, 17) for patch in range(3)]
    transformers = [f"{major}.{minor}.{patch}" for major in (4, 5) for minor in range(60) for patch in range(4)]
    for environment in json.loads(ENVIRONMENTS.read_text()):
        allowed = [version for version in torch if version in SpecifierSet(environment["torch"])]
        fits = [name for name in ("rl-logprobs", "fsdp-runtime") if any(_required(name, "torch").filter(allowed))]
        of_models = [version for version in transformers if version in SpecifierSet(environment["transformers"])]
        if "fsdp-runtime" in fits and not any(_required("fsdp-runtime", "transformers").filter(of_models)):
            fits[-1] += " without weights"
        assert environment["fits"] == ["tp-plans", *fits], environment["project"]
