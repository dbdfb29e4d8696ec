"""The rules of the house that import-linter cannot state: circles, sizes of files, public names."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from harness.prose import WORDINGS, count, count_package

PACKAGES = Path(__file__).parents[1] / "packages"
NAMES = ("tp_plans", "fsdp_runtime", "rl_logprobs")
#: A longer file has two subjects.
MOST_LINES = 450
#: Public names of the three top levels together: a new one takes the place of an old one.
MOST_NAMES = 100
#: Lines of source per package.  A package grows by the lines that it loses elsewhere; a ceiling only goes down.
MOST_SOURCE_LINES = {"tp-plans": 12_929, "fsdp-runtime": 44_738, "rl-logprobs": 8_206}
#: Lines with a wording that hides the noun of a sentence, over the three packages.  A ceiling only goes down.
MOST_WORDINGS = {
    "whose": 1,
    "that of, those of": 0,
    "what is, are, the, a": 0,
    "of its own": 3,
    "alike, anew, apart": 1,
    "of which": 0,
    "that there are": 0,
    "the local found": 29,
}
Graph = Mapping[str, set[str]]


@cache
def _files() -> dict[str, Path]:
    """The source file of each module."""
    found = {}
    for source in PACKAGES.glob("*/src"):
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _tree(name: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(_files()[name].read_text(encoding="utf-8"))


@cache
def _graph() -> Graph:
    """The modules that each module imports: at once, later in a function, or for types only."""
    files = _files()
    return {name: set(imported(name, path, files)) - {name} for name, path in files.items()}


def imported(module: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The known modules that a file imports anywhere: ``from package import name`` counts where the name is found."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found = (f"{base}.{alias.name}" for alias in node.names)
            yield from (each if each in known else base for each in found if each in known or base in known)


def circles(graph: Graph) -> list[set[str]]:
    """The largest sets of modules that reach one another."""
    reached = {name: _reached(graph, name) for name in graph}
    found: list[set[str]] = []
    for name in graph:
        if name in reached[name] and not any(name in circle for circle in found):
            found.append({other for other in reached[name] if name in reached[other]})
    return found


def _reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(graph[name])
    return found


def listed_names(docstring: str) -> set[str]:
    """The names in a docstring's table of contents: the paragraph of lines such as "Mesh:  ``MeshSpec``"."""
    tables = (each for each in docstring.split("\n\n") if re.match(r"\s*\w[\w' -]*: +``", each))
    return set(re.findall(r"``(\w+)``", "".join(tables)))


def _public(package: str) -> set[str]:
    return set(importlib.import_module(package).__all__)


def test_no_circle_of_imports() -> None:
    """Imports in functions and for types count."""
    assert [sorted(found) for found in circles(_graph())] == []


def test_a_circle_would_be_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert circles(graph) == [{"a", "b", "c"}]


def test_only_the_model_tree_of_tp_plans_lists_the_modules_of_a_model() -> None:
    readers = {
        name
        for name in _files()
        if name.startswith("tp_plans.")
        for node in ast.walk(_tree(name))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("named_modules", "named_parameters")
    }
    assert readers == {"tp_plans.model_tree"}


def test_fsdp_runtime_imports_documented_names_of_tp_plans() -> None:
    undocumented = [
        f"{name}: {node.module}.{alias.name}"
        for name in _files()
        if name.startswith("fsdp_runtime.")
        for node in ast.walk(_tree(name))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tp_plans"
        for alias in node.names
        if alias.name not in _public(str(node.module))
    ]
    assert undocumented == []


def test_no_file_has_two_subjects() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in _files().items()}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


@pytest.mark.parametrize("package", MOST_SOURCE_LINES)
def test_sources_stay_below_their_ceiling(package: str) -> None:
    files = (PACKAGES / package / "src").rglob("*.py")
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert lines <= MOST_SOURCE_LINES[package]


def test_wordings_stay_below_their_ceilings() -> None:
    counts = [count_package(package) for package in MOST_SOURCE_LINES]
    totals = {wording: sum(one[wording] for one in counts) for wording in WORDINGS}
    assert not {wording: total for wording, total in totals.items() if total > MOST_WORDINGS[wording]}


def test_count_passes_over_a_quoted_wording() -> None:
    lines = ["# The rank whose shard", "# ``whose`` is a word", "# a part of which", "found = 1"]
    counts = count(lines)
    assert (counts["whose"], counts["of which"], counts["the local found"]) == (1, 1, 1)


def test_the_top_levels_do_not_grow() -> None:
    counts = {package: len(_public(package)) for package in NAMES}
    assert sum(counts.values()) <= MOST_NAMES, counts


@pytest.mark.parametrize("package", NAMES)
def test_public_names_are_those_of_the_table_of_contents(package: str) -> None:
    listed, public = listed_names(importlib.import_module(package).__doc__ or ""), _public(package)
    missing = sorted(public - _implied(package, listed))
    assert not missing, f"not in the table of {package}: {missing}"
    assert listed <= public, f"in the table, but not public: {sorted(listed - public)}"


def _implied(package: str, listed: set[str]) -> set[str]:
    """The listed names, subclasses of listed errors, and classes that listed functions return or that results hold."""
    module = importlib.import_module(package)
    public = {name: getattr(module, name) for name in _public(package)}
    errors = tuple(public[name] for name in listed & {*public} if name.endswith("Error"))
    found = {name for name, each in public.items() if isinstance(each, type) and issubclass(each, errors)}
    waiting = [*listed]
    while waiting:
        name = waiting.pop()
        found.add(name)
        types = getattr(public.get(name), "__annotations__", {})
        text = str([*types.values()] if isinstance(public.get(name), type) else types.get("return"))
        waiting.extend(({*re.findall(r"\w+", text)} & {*public}) - found)
    return found
