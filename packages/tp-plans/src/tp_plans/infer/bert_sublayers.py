"""Recognise the sub-layers of BERT's blocks (arXiv:1810.04805), whose layers sit in modules apart.

Attention is ``attention.self`` with queries, keys and values, and ``attention.output.dense``; an MLP is
``intermediate.dense`` and ``output.dense``.  Each output module adds the residual stream and ends in a norm.
"""

from __future__ import annotations

from collections.abc import Iterator

from tp_plans.infer.sublayers import Sublayer
from tp_plans.model_tree import ModelTree, join
from tp_plans.naming import KV_PROJECTION, QUERY_PROJECTION, leaf

#: The prefixes of the names of an MLP's two modules, whose suffixes are the same.
_INTERMEDIATE, _OUTPUT = "intermediate", "output"


def sublayers_apart(block: str, tree: ModelTree) -> Iterator[Sublayer]:
    """Iterate over the sub-layers of a block whose output projection is in another module than their inputs."""
    for path in (block, *tree.below(block)):
        for child in tree.children[path]:
            name = leaf(child)
            suffix = name.removeprefix(_INTERMEDIATE) if name.startswith(_INTERMEDIATE) else ""
            output = join(path, f"{_OUTPUT}{suffix}")
            inputs = _queries_keys_values(child, tree) or _column(child, name, tree)
            row = _row(output, tree) if inputs and output in tree.modules else None
            if row is not None and {tree.shape(each) for each in inputs} == {tree.shape(row)[::-1]}:
                yield Sublayer(path=child, input_projs=inputs, output_proj=row, inner_dim=tree.shape(row)[1])


def _queries_keys_values(path: str, tree: ModelTree) -> tuple[str, ...]:
    layers = _only_linears(path, tree)
    queries = [layer for layer in layers if QUERY_PROJECTION.fullmatch(leaf(layer))]
    others = [layer for layer in layers if KV_PROJECTION.fullmatch(leaf(layer))]
    return layers if len(queries) == 1 and len(others) == 2 and len(layers) == 3 else ()


def _column(path: str, name: str, tree: ModelTree) -> tuple[str, ...]:
    layers = _only_linears(path, tree)
    return layers if name.startswith(_INTERMEDIATE) and len(layers) == 1 else ()


def _only_linears(path: str, tree: ModelTree) -> tuple[str, ...]:
    """Return the linear layers of a module that owns nothing else."""
    owners = [join(path, name) for name in sorted(tree.children_with_parameters(path))]
    known = all(tree.is_linear(each) for each in owners) and not tree.own_parameters(path)
    return tuple(owners) if known else ()


def _row(path: str, tree: ModelTree) -> str | None:
    """Return the one linear layer of a module that has a norm besides, or nothing."""
    owners = [join(path, name) for name in tree.children_with_parameters(path)]
    layers = [each for each in owners if tree.is_linear(each)]
    rest = [each for each in owners if each not in layers]
    known = not tree.own_parameters(path) and all(map(tree.is_norm, rest))
    return layers[0] if known and len(layers) == 1 else None
