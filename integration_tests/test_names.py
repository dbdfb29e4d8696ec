"""Class names are unique over the three packages, and errors of one name have one builtin base."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
NAMES = ("tp-plans", "fsdp-runtime", "rl-logprobs")

#: Names that may be defined in several files, with the reason.
SHARED = {
    "ModelError": "an error of tp_plans and of fsdp_runtime, which do not share a base package",
    "LayoutError": "an error of tp_plans and of fsdp_runtime, which do not share a base package",
    "OptionError": "an error of fsdp_runtime and of rl_logprobs, which do not share a base package",
}


@cache
def _classes() -> tuple[tuple[str, Path, ast.ClassDef], ...]:
    return tuple(_read_classes())


def _read_classes() -> Iterator[tuple[str, Path, ast.ClassDef]]:
    for name in NAMES:
        for file in sorted((PACKAGES / name / "src").rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    yield node.name, file.relative_to(PACKAGES), node


def _builtin_bases(name: str, file: Path) -> set[str]:
    """The builtin exceptions among the bases of a class, through the classes of its own file."""
    classes = {found: node for found, path, node in _classes() if path == file}
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for base in classes[waiting.pop()].bases:
            base_name = base.id if isinstance(base, ast.Name) else ""
            if base_name in classes:
                waiting.append(base_name)
            elif isinstance(getattr(builtins, base_name, None), type) and base_name != "Exception":
                found.add(base_name)
    return found


def _definitions() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = defaultdict(list)
    for name, file, _ in _classes():
        found[name].append(file)
    return found


def test_no_class_name_is_defined_twice() -> None:
    twice = {name: files for name, files in _definitions().items() if len(files) > 1 and name not in SHARED}
    listed = [f"{name}: {', '.join(map(str, files))}" for name, files in sorted(twice.items())]
    assert not listed, "\n".join(listed)


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_name_is_still_shared(name: str) -> None:
    assert len(_definitions()[name]) > 1, f"{name} is defined once: remove it from SHARED"


@pytest.mark.parametrize("name", [name for name in SHARED if name.endswith("Error")])
def test_errors_of_one_name_have_one_builtin_base(name: str) -> None:
    bases = {str(file): _builtin_bases(name, file) for file in _definitions()[name]}
    assert len({frozenset(each) for each in bases.values()}) == 1, bases
