"""Write docs/refusals.md: every error that ``parallelize`` and a parallelized model raise on purpose.

The rows are read from the sources, with ``ast``: each ``raise`` of an error of our own, and each finding of the check
of a plan that is an error. integration_tests/test_refusals.py provokes every one of them.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "refusals.md"
PACKAGES = ("fsdp-runtime", "tp-plans")
FINDING = "Finding"
FINDING_ERROR = "CheckFailedError"  # lists all findings at once

#: The sections of the page, and the files or folders of each.
SECTIONS: Mapping[str, Sequence[str]] = {
    "The call": ("values.py", "keywords.py", "parallelism.py", "setup.py", "model/structure.py"),
    "Meshes": ("mesh/spec.py", "mesh/experts.py"),
    "Plans": (
        "tp_plans/resolve.py",
        "tp_plans/registry.py",
        "tp_plans/models/spec.py",
        "tp_plans/inner_models.py",
        "tp_plans/hugging_face",
        "tp_plans/infer",
        "tp_plans/lora.py",
        "tp_plans/checks",
    ),
    "Packed rows and shared prefixes": ("steps/documents", "_transformers_compat/masks.py"),
    "Tensor and sequence parallelism": ("steps/refused_adapters.py", "steps/tensor"),
    "Expert parallelism": ("steps/experts",),
    "Context parallelism": ("steps/context",),
    "Random states": ("steps/random_states.py",),
    "Activation checkpointing": ("steps/checkpointing.py", "steps/saved_tensors.py"),
    "Compile": ("steps/compile.py",),
    "FSDP2 and Megatron-FSDP": ("steps/fsdp",),
    "Outputs and losses": ("steps/outputs",),
    "Around a parallelized model": ("steps/guards",),
    "Trainers": ("trainers/training_arguments.py",),
}
#: Functions whose result is named by their argument.
_OF_ARGUMENT = ("type", "map", "sorted", "list", "dict", "str", "tuple", "repr")
#: The longest expression that stands for its own value.
_LONGEST = 30
INTRODUCTION = (
    "Look up an error of `parallelize` or of a parallelized model, or see before a run what is refused: why, and what "
    "to do instead. These are all {count} that are raised on purpose. `{{name}}` stands for a value of the call. A "
    "`LayoutError` is about the inputs of a call; what `parallelize` raises comes before it has changed a module. "
    "`docs/generate/refusals.py` writes this page from the sources, and a test provokes each row."
)


@dataclass(frozen=True)
class Row:
    """One statement that refuses something.

    Args:
        file: below the folder of the sources, as ``fsdp_runtime/keywords.py``.
        function: the qualified name of the function that it is in.
        error: the class of the error.
        message: the message, with ``{name}`` for what is filled in.
        lines: the first and last line of the statement.
    """

    file: str
    function: str
    error: str
    message: str
    lines: tuple[int, int]

    @property
    def is_finding(self) -> bool:
        """Whether it is a finding of the check of a plan, which raises one error for all."""
        return self.error == FINDING_ERROR and not self.file.endswith("report.py")

    def is_said_by(self, message: str) -> bool:
        """Return whether a message is this row's."""
        pattern = ".*".join(re.escape(part) for part in re.split(r"\{[^{}]*\}", self.message))
        return re.fullmatch(pattern, message, flags=re.DOTALL) is not None


@dataclass(frozen=True)
class Scope:
    """A function, or the module itself, with the names that have a known text."""

    node: ast.AST
    function: str
    known: Mapping[str, ast.expr]


class Source:
    """One file of the sources."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.tree = name, ast.parse(path.read_text())
        self.constants = {target.id: value for target, value in _assignments(self.tree.body)}
        self.functions = {each.name: each for each in ast.walk(self.tree) if isinstance(each, ast.FunctionDef)}

    @property
    def subject(self) -> str:
        """The first line of the module's docstring."""
        return (ast.get_docstring(self.tree) or "").partition("\n")[0].rstrip(".")

    @cached_property
    def errors(self) -> frozenset[str]:
        """The names of errors of our own."""
        imported = (
            alias.name
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(".errors")
            for alias in node.names
        )
        return frozenset(imported)

    def rows(self) -> list[Row]:
        """Every row of the file, in the order of its lines."""
        found = [row for scope, node in _scopes(self.tree) for row in self._rows(scope, node)]
        return sorted(dict.fromkeys(found), key=lambda row: row.lines)

    def _rows(self, scope: Scope, node: ast.AST) -> Iterator[Row]:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            name = node.exc.func.id
            error, inner = node.exc, scope
            if name not in self.errors and (made := self._returned(name)) is not None:
                error, inner = made
            if (name := getattr(error.func, "id", "")) in self.errors:
                for known in self._entries(scope, node):
                    message = "".join(self.text(each, _with(inner, known)) for each in error.args[:1])
                    yield Row(self.name, scope.function, name, message, _lines(node))
        if isinstance(node, ast.Call) and _called(node) == FINDING and getattr(node.args[0], "value", "") == "error":
            for call, inner in self._callers(node, scope):
                message = "; ".join(self.text(each, inner) for each in call)
                yield Row(self.name, inner.function, FINDING_ERROR, message, _lines(node))

    def _returned(self, name: str) -> tuple[ast.Call, Scope] | None:
        """Return the error that a function makes."""
        function = self.functions.get(name)
        returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)] if function else []
        if function is None or len(returned) != 1 or not isinstance(returned[0], ast.Call):
            return None
        return returned[0], Scope(function, name, {})

    def _entries(self, scope: Scope, node: ast.AST) -> Iterator[dict[str, ast.expr]]:
        """Yield the values of a loop's names, once for each entry of the table that it iterates over."""
        loop = next((each for each in ast.walk(scope.node) if isinstance(each, ast.For) and _is_in(node, each)), None)
        table = loop.iter if loop is not None else None
        if isinstance(table, ast.Call) and _called(table) == "items":
            table = table.func.value  # type: ignore[attr-defined]
        table = self.constants.get(getattr(table, "id", ""))
        if loop is None or not isinstance(table, ast.Tuple | ast.Dict) or not isinstance(loop.target, ast.Tuple):
            yield {}
            return
        for entry in table.elts if isinstance(table, ast.Tuple) else _items(table):
            names = (getattr(target, "id", "") for target in loop.target.elts)
            yield dict(zip(names, getattr(entry, "elts", ()), strict=False))

    def _callers(self, finding: ast.Call, scope: Scope) -> Iterator[tuple[list[ast.expr], Scope]]:
        """Yield the texts of a finding; where they are arguments of a private function, those of each call of it."""
        texts = finding.args[2:]
        names = [each.arg for each in scope.node.args.args] if isinstance(scope.node, ast.FunctionDef) else []
        if not any(isinstance(each, ast.Name) and each.id in names for each in texts):
            yield texts, scope
            return
        for outer, node in _scopes(self.tree):
            if isinstance(node, ast.Call) and _called(node) == getattr(scope.node, "name", ""):
                given = dict(zip([name for name in names if name != "self"], node.args, strict=False))
                yield [given.get(getattr(each, "id", ""), each) for each in texts], outer

    def text(self, node: ast.expr, scope: Scope) -> str:
        """Return the text of an expression, with ``{name}`` for what is not known before it runs."""
        match node:
            case ast.Constant(value=str(value)):
                return value
            case ast.JoinedStr(values=values):
                return "".join(self.text(each, scope) for each in values)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.text(left, scope) + self.text(right, scope)
            case ast.FormattedValue(value=ast.Name() as name):
                return self.text(name, scope)
            case ast.FormattedValue(value=value):
                return "{" + _label(value) + "}"
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                returned = [each.value for each in ast.walk(self.functions[name]) if isinstance(each, ast.Return)]
                if len(returned) == 1 and isinstance(returned[0], ast.JoinedStr | ast.Constant):
                    return self.text(returned[0], Scope(self.functions[name], name, {}))
            case ast.Tuple(elts=elts) if all(isinstance(each, ast.Constant) for each in elts):  # a key of fromkeys
                return "{" + ", ".join(str(each.value) for each in elts) + "}"  # type: ignore[attr-defined]
            case ast.Name(id=name):
                known = scope.known.get(name) or _assigned(node, scope) or self.constants.get(name)
                texts = ast.JoinedStr | ast.Constant | ast.BinOp | ast.Name | ast.Tuple
                if isinstance(known, texts) and known is not node:
                    return self.text(known, scope)
        return "{" + _label(node) + "}"


def sources(root: Path = ROOT) -> Iterator[tuple[str, Source]]:
    """Yield each file with its section.

    Raises:
        ValueError: a file of ``steps`` is in no section.
    """
    folders = {name.replace("-", "_"): root / "packages" / name / "src" for name in PACKAGES}
    seen: set[Path] = set()
    for section, places in SECTIONS.items():
        for place in places:
            package, _, below = place.partition("/") if place.startswith("tp_plans/") else ("fsdp_runtime", "", place)
            start = folders[package] / package / below
            for path in sorted(start.rglob("*.py")) if start.is_dir() else [start] * start.exists():
                seen.add(path)
                yield section, Source(path, str(path.relative_to(folders[package])))
    folder = folders["fsdp_runtime"] / "fsdp_runtime" / "steps"
    # Recorded routes are checked in the calls that record and replay, not by `parallelize`.
    steps = set(folder.rglob("*.py")) - set((folder / "routing").rglob("*.py"))
    if left := [path for path in sorted(steps - seen) if Source(path, path.name).rows()]:
        raise ValueError(f"{', '.join(map(str, left))}: add it to a section of SECTIONS")


def rows(root: Path = ROOT) -> list[Row]:
    """Every row of the sources, in the order of the page."""
    return [row for _, source in sources(root) for row in source.rows()]


def page(root: Path = ROOT) -> str:
    """The page in Markdown; statements of one file that say the same share a line."""
    sections: dict[str, list[str]] = {name: [] for name in SECTIONS}
    count = 0
    for section, source in sources(root):
        lines = list(dict.fromkeys(f"- `{row.error}`: {_code(row.message)}" for row in source.rows()))
        count += len(lines)
        if lines:
            subject = source.subject.replace("``", "`")
            sections[section] += [f"{subject} (`{source.name}`):", "", *lines, ""]
    parts = ["# What is refused", "", INTRODUCTION.format(count=count), ""]
    for section, lines in sections.items():
        parts += [f"## {section}", "", *lines] if lines else []
    return "\n".join(parts)


def _code(text: str) -> str:
    return f"`{' '.join(text.split())}`"


def _with(scope: Scope, known: Mapping[str, ast.expr]) -> Scope:
    return Scope(scope.node, scope.function, {**scope.known, **known})


def _scopes(tree: ast.Module) -> Iterator[tuple[Scope, ast.AST]]:
    """Yield every node with the innermost function that it is in."""
    waiting: list[tuple[Scope, ast.AST]] = [(Scope(tree, "", {}), tree)]
    while waiting:
        scope, node = waiting.pop()
        yield scope, node
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = f"{scope.function}.{node.name}".lstrip(".")
            scope = Scope(node if isinstance(node, ast.FunctionDef) else scope.node, inside, {})
        waiting += [(scope, child) for child in ast.iter_child_nodes(node)]


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.Name, ast.expr]]:
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target, node.value


def _assigned(name: ast.Name, scope: Scope) -> ast.expr | None:
    """Return what a function gives to a name last before it is read, if that is a text."""
    if isinstance(scope.node, ast.Module):
        return None
    values = [value for target, value in _assignments(ast.walk(scope.node)) if target.id == name.id]
    last = max((each for each in values if each.lineno < name.lineno), key=lambda each: each.lineno, default=None)
    return last if isinstance(last, ast.JoinedStr | ast.Constant) else None


def _items(table: ast.Dict) -> Iterator[ast.Tuple]:
    """Yield (key, value) of a dict's display; of ``**dict.fromkeys(keys, value)`` one for all keys."""
    for key, value in zip(table.keys, table.values, strict=True):
        if key is not None:
            yield ast.Tuple([key, value])
        elif isinstance(value, ast.Call) and _called(value) == "fromkeys":
            yield ast.Tuple([value.args[0], value.args[1]])


def _called(node: ast.Call) -> str:
    return str(getattr(node.func, "id", "") or getattr(node.func, "attr", ""))


def _is_in(node: ast.AST, outer: ast.AST) -> bool:
    return any(each is node for each in ast.walk(outer))


def _lines(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.end_lineno  # type: ignore[attr-defined]


def _label(node: ast.AST) -> str:
    """Return a name for a value: that of the variable, attribute or function that it comes from."""
    match node:
        case ast.Name(id=name):
            return name.strip("_") if not name.isupper() else name.strip("_").replace("_", " ").lower()
        case ast.Attribute(value=ast.Call(args=[*_, value]), attr="__name__"):
            return f"class of {_label(value)}"
        case ast.Attribute(value=value, attr="__name__"):
            return f"class of {_label(value)}"
        case ast.Call(func=ast.Name(id="type_name"), args=[value]):
            return f"class of {_label(value)}"
        case ast.Call(func=ast.Attribute(value=value, attr="tolist" | "flatten")):
            return _label(value)
        case ast.Attribute(attr=name):
            return name.strip("_")
        case ast.Call(func=ast.Attribute(attr="join"), args=[given, *_]):
            return _label(given)
        case ast.Call(func=ast.Name(id="len"), args=[given, *_]):
            return f"number of {_label(given)}"
        case ast.Call(
            func=ast.Name(id="type" | "map" | "sorted" | "list" | "dict" | "str" | "tuple" | "repr"), args=args
        ):
            return _label(args[-1]) if args else "..."
        case ast.Call(func=function):
            return _label(function).removeprefix("get_")
        case ast.Subscript(value=value) | ast.Starred(value=value) | ast.FormattedValue(value=value):
            return _label(value)
        case ast.BoolOp(values=[first, *_]):
            return _label(first)
        case ast.GeneratorExp(generators=[first, *_]) | ast.ListComp(generators=[first, *_]):
            return _label(first.iter)
    text = ast.unparse(node)
    return text if len(text) <= _LONGEST and not set(text) & set("{}`") else "..."


def main() -> None:
    """Write the page, or count the rows of a tree."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=Path, help="print the number of rows of another tree of this repository")
    options = parser.parse_args()
    if options.count is not None:
        found = rows(options.count)
        print(len(found), len({(row.file, row.error, row.message) for row in found}))
        return
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
