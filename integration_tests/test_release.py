"""The check before a release refuses what must not be released, one thing at a time."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from release.oldest_release import bounds, oldest

ROOT = Path(__file__).parents[1]
METADATA = """Metadata-Version: 2.4
Name: tp-plans
Version: 0.2.0
Summary: Plans.
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
Requires-Dist: torch>=2.11,<2.16; extra == "torch"
Description-Content-Type: text/markdown
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package that can be released as 0.2.0, with its wheel and sdist."""
    source = {
        "pyproject.toml": (ROOT / "packages/tp-plans/pyproject.toml").read_text(),
        "CHANGELOG.md": "# Changelog\n\n## 0.2.0 (2026-02-03)\n\n- New.\n",
        "README.md": "",
        "LICENSE": "",
        "src/tp_plans/__init__.py": '__version__ = "0.2.0"\n',
        "src/tp_plans/py.typed": "",
    }
    for name, content in source.items():
        path = tmp_path / "packages/tp-plans" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "dist").mkdir()
    with tarfile.open(tmp_path / "dist/tp_plans-0.2.0.tar.gz", "w:gz") as sdist:
        for name in source:
            sdist.add(tmp_path / "packages/tp-plans" / name, f"tp_plans-0.2.0/{name}")
    _wheel(tmp_path)
    return tmp_path


def _wheel(tree: Path, metadata: str = METADATA, **more: str) -> None:
    info = "tp_plans-0.2.0.dist-info"
    members = {"tp_plans/__init__.py": "", "tp_plans/py.typed": "", f"{info}/licenses/LICENSE": "", **more}
    with zipfile.ZipFile(tree / "dist/tp_plans-0.2.0-py3-none-any.whl", "w") as wheel:
        for name, content in {**members, f"{info}/METADATA": metadata}.items():
            wheel.writestr(name, content)


def _said(tree: Path, version: str = "0.2.0") -> str:
    """What the tool says; nothing if the package can be released."""
    command = [sys.executable, ROOT / "integration_tests/release/release.py", "tp-plans", version]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert run.returncode == (1 if run.stderr else 0)
    return run.stderr


def test_a_package_in_order_passes(tree: Path) -> None:
    assert _said(tree) == ""


def test_another_version_is_refused_in_every_place(tree: Path) -> None:
    said = _said(tree, "0.3.0")
    assert "no entry for 0.3.0; there are ['0.2.0']" in said
    assert "__version__ is '0.2.0', and 0.3.0 is to be released" in said
    assert "tp_plans-0.3.0-py3-none-any.whl is missing" in said


def test_an_entry_without_a_date_is_refused(tree: Path) -> None:
    changelog = tree / "packages/tp-plans/CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("2026-02-03", "unreleased"))
    assert "0.2.0 has the date 'unreleased'" in _said(tree)


@pytest.mark.parametrize("stray", ["tests/test_plan.py", "tp_plans.egg-info/PKG-INFO"])
def test_a_stray_file_is_refused(tree: Path, stray: str) -> None:
    _wheel(tree, **{stray: ""})
    assert f"unexpected {stray}" in _said(tree)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("License-Expression: Apache-2.0\n", "", "License-Expression is None"),
        ("torch>=2.11,<2.16", "torch", "has no lower bound"),
        (
            "Summary: Plans.",
            "Summary: Plans.\nProject-URL: Docs, https://tp-plans.example/",
            "is not under https at one of",
        ),
    ],
    ids=["licence", "bound", "address"],
)
def test_incomplete_metadata_is_refused(tree: Path, before: str, after: str, told: str) -> None:
    _wheel(tree, METADATA.replace(before, after))
    assert told in _said(tree)


def test_the_oldest_supported_release_is_the_lowest_tag_within_the_bounds(tmp_path: Path) -> None:
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-qm", "-"]
    for command in (
        ["init", "-q"],
        commit,
        *(["tag", f"tp-plans-v{v}"] for v in ("0.0.9", "0.1.10", "0.1.9", "0.2.0")),
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert oldest("tp-plans", Requirement("tp-plans>=0.1,<0.2"), tmp_path) == "tp-plans-v0.1.9"
    assert oldest("tp-plans", None, tmp_path) == "tp-plans-v0.0.9"
    assert oldest("tp-plans", Requirement("tp-plans>=0.3"), tmp_path) is None


def test_the_runtime_bounds_the_plans_on_both_sides() -> None:
    wanted = bounds("tp-plans", "fsdp-runtime", ROOT)
    assert wanted is not None
    assert {each.operator for each in wanted.specifier} == {">=", "<"}
