"""The modules of the package import one another in one direction only."""

import ast
from pathlib import Path

import tp_plans

PACKAGE = Path(tp_plans.__file__).parent


def module_name(file):
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_at_import_time(tree):
    """The import statements that run when a module is imported: not those in functions or under TYPE_CHECKING."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def imported(node, known):
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name in known}
    # `from package import name` imports the submodule of that name, where there is one, else a name of the package.
    names = {f"{node.module}.{alias.name}" for alias in node.names}
    return {name if name in known else node.module for name in names} & known


def graph():
    files = {module_name(file): file for file in PACKAGE.rglob("*.py")}
    edges = {}
    for name, file in files.items():
        nodes = imports_at_import_time(ast.parse(file.read_text()))
        edges[name] = {target for node in nodes for target in imported(node, files.keys())} - {name, "tp_plans"}
    return edges


def cycle(edges):
    """Modules that import one another in a circle; none where there is an order."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        found = next((found for target in sorted(edges[name]) if (found := visit(target))), [])
        path.pop()
        done.add(name)
        return found

    return next((found for name in sorted(edges) if (found := visit(name))), [])


def test_no_modules_import_one_another_in_a_circle():
    assert cycle(graph()) == []


def test_a_circle_would_be_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def test_only_the_model_tree_lists_the_modules_of_a_model():
    readers = {
        file.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("named_modules", "named_parameters")
    }
    assert readers == {"model_tree.py"}
