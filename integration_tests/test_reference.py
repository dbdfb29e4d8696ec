"""The API pages name objects that exist, and every public name."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "tp-plans": (
        "tp_plans",
        "tp_plans.boxes",
        "tp_plans.checks",
        "tp_plans.explanation",
        "tp_plans.infer",
        "tp_plans.models",
        "tp_plans.styles",
        "tp_plans.transfer",
        "tp_plans.verification",
    ),
    "fsdp-runtime": (
        "fsdp_runtime",
        "fsdp_runtime.batching",
        "fsdp_runtime.dry_run",
        "fsdp_runtime.mesh",
        "fsdp_runtime.meters",
        "fsdp_runtime.model",
        "fsdp_runtime.monitor",
        "fsdp_runtime.optim",
        "fsdp_runtime.steps",
        "fsdp_runtime.sync",
        "fsdp_runtime.trainers",
    ),
    "rl-logprobs": ("rl_logprobs",),
}


def _entries(package: str) -> list[str]:
    """Return the dotted paths on the reference page of a package."""
    page = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
    return re.findall(r"^::: (\S+)$", page, re.MULTILINE)


@cache
def _defined(file: Path) -> frozenset[str]:
    """Return the names that a file itself defines: the builder of the pages reads sources and does not import them."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def _exists(package: str, entry: str) -> bool:
    source = ROOT / "packages" / package / "src" / Path(*entry.split("."))
    if source.is_dir() or source.with_suffix(".py").exists():
        return True
    for file in (source.parent.with_suffix(".py"), source.parent / "__init__.py"):
        if file.exists():
            return source.name in _defined(file)
    return False


@pytest.mark.parametrize("package", ROOMS)
def test_entries_exist_and_stand_once(package: str) -> None:
    entries = _entries(package)
    assert [entry for entry in entries if not _exists(package, entry)] == []
    assert [entry for entry in set(entries) if entries.count(entry) > 1] == []


@pytest.mark.parametrize("package", ROOMS)
def test_page_has_every_public_name(package: str) -> None:
    page = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
    shown = {entry.rpartition(".")[2] for entry in _entries(package)} | set(re.findall(r"`(\w+)`", page))
    public = {name for room in ROOMS[package] for name in getattr(importlib.import_module(room), "__all__", ())}
    assert sorted(public - shown) == []


@pytest.mark.parametrize("package", ["tp-plans", "fsdp-runtime"])
def test_section_names_the_room_of_names_outside_the_top_level(package: str) -> None:
    page, name = (ROOT / "docs" / "reference" / f"{package}.md").read_text(), package.replace("-", "_")
    top = {*importlib.import_module(name).__all__, *vars(importlib.import_module(f"{name}.errors"))}
    for section in page.split("\n## ")[1:]:
        names = {entry.rpartition(".")[2] for entry in re.findall(r"^::: (\S+)$", section, re.MULTILINE)} - top
        rooms = {room for room in ROOMS[package] if names & set(importlib.import_module(room).__all__)}
        assert [room for room in sorted(rooms) if f"`{room}`" not in section] == [], section.partition("\n")[0]
