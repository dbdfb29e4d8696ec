"""What others keep private is used in the compat files only, and nothing that is loaded may run code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
SOURCES = sorted(PACKAGES.glob("*/src/**/*.py"))
#: Documented as public, whatever they are called: a named tuple's, and the one that ends a process at once.
DOCUMENTED = {"_replace", "_exit"}
OTHERS = ("torch", "transformers", "peft", "megatron_fsdp", "safetensors")
#: Files ``_torch_compat.py``, and those of folders of such names.
COMPAT = [path for path in SOURCES if path.stem.endswith("_compat") or path.parent.name.endswith("_compat")]


def _private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _foreign(dotted: str) -> bool:
    return dotted.partition(".")[0] in OTHERS


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines that import or read something private of another project, or of an object that is not our own."""
    own = _own_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                used = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                used = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "aten") | ast.Attribute(attr="aten")):
                continue  # our own, and operators, whose names are data
            case ast.Attribute(value=value, attr=name) if _private(name) and name not in own | DOCUMENTED:
                yield node.lineno, f"{ast.unparse(value)}.{name}"
                continue
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(str(name)), *_]):
                if _private(name) and name not in own and ast.unparse(node.args[0]) != "aten":
                    yield node.lineno, ast.unparse(node)
                continue
            case _:
                continue
        for dotted in used:
            if _foreign(dotted) and any(_private(part) for part in dotted.split(".")):
                yield node.lineno, dotted


def _own_names(tree: ast.Module) -> set[str]:
    """Private names that the file itself gives: to functions, classes, arguments, ``self`` and fields."""
    own: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
    return own


def unsafe_loads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Calls that may run code from what they read."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called == "torch.load" and given.get("weights_only") != "True":
            yield node.lineno, ast.unparse(node)
        if called.endswith(("pickle.load", "pickle.loads", "Unpickler")) or called in ("eval", "exec", "os.system"):
            yield node.lineno, ast.unparse(node)
        if given.get("trust_remote_code", "False") != "False":
            yield node.lineno, ast.unparse(node)


def _found(path: Path, uses: Iterator[tuple[int, str]]) -> list[str]:
    return [f"{path.relative_to(PACKAGES)}:{line}: {use}" for line, use in uses]


def test_private_parts_of_other_projects_are_used_in_the_compat_files_only() -> None:
    elsewhere = [path for path in SOURCES if path not in COMPAT]
    assert [use for path in elsewhere for use in _found(path, private_uses(ast.parse(path.read_text())))] == []


@pytest.mark.parametrize("path", COMPAT, ids=lambda path: str(path.relative_to(PACKAGES)))
def test_every_function_of_a_compat_file_gives_its_reason(path: Path) -> None:
    tree = ast.parse(path.read_text())
    without = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not _private(node.name) and not ast.get_docstring(node)
    ]
    assert without == []


def test_nothing_that_is_loaded_may_run_code() -> None:
    assert [use for path in SOURCES for use in _found(path, unsafe_loads(ast.parse(path.read_text())))] == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch.distributed.tensor import _utils",
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "torch._foreach_norm([], 2)",
        "mesh._flatten('dp')",
        "getattr(model, '_weight_conversions', None)",
    ],
)
def test_the_search_finds_private_uses(line: str) -> None:
    assert len(list(private_uses(ast.parse(line)))) == 1


@pytest.mark.parametrize("line", ["import torch", "self._own = 1; other._own", "def _f(): ...\n_f()", "x.__class__"])
def test_the_search_leaves_our_own_names_alone(line: str) -> None:
    assert list(private_uses(ast.parse(line))) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "pickle.load(file)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=flag)",
    ],
)
def test_the_search_finds_loads_that_may_run_code(line: str) -> None:
    assert len(list(unsafe_loads(ast.parse(line)))) == 1
