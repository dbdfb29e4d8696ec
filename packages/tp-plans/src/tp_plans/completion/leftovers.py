"""What no sub-layer's structure explains: stored split, and used whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from tp_plans.completion.tree import Tree, agreed, generalised, is_linear, parameters_of, size_of
from tp_plans.layouts import Replicate
from tp_plans.styles import (
    BareParameter,
    ColwiseParallel,
    ParallelAttention,
    Style,
    VocabParallelEmbedding,
)

#: The share of the model from which a parameter, of all blocks together, is worth a gather of its own.
LARGE = 0.003

#: The least number of rows that are split: fewer (a router's experts) leave ranks of a large axis empty.
ROWS = 16


def stored_split(tree: Tree) -> Mapping[str, Style]:
    """Rules for the large parameters that the plan leaves whole."""
    sizes: dict[str, int] = defaultdict(int)
    total = 0
    for path, module in tree.modules.items():
        for name, parameter in parameters_of(module).items():
            sizes[generalised(f"{path}.{name}")] += prod(parameter.shape)
            total += prod(parameter.shape)
    large = {pattern for pattern, size in sizes.items() if size >= LARGE * total}
    return agreed(_stored_split(tree, large))


def _stored_split(tree: Tree, large: set[str]) -> Iterator[tuple[str, Style]]:
    for path, module in tree.inside():
        wanted = [
            name
            for name, parameter in parameters_of(module).items()
            if generalised(f"{path}.{name}") in large and parameter.ndim > 1 and parameter.shape[0] >= ROWS
        ]
        if not wanted or (tree.style(path) is not None and not isinstance(tree.style(path), ParallelAttention)):
            continue
        if is_linear(module) and wanted == ["weight"]:
            if _reads_whole(path, module, tree):
                yield path, ColwiseParallel(output=Replicate())
        elif hasattr(module, "num_embeddings"):
            yield path, VocabParallelEmbedding()
        elif not hasattr(module, "kernel_size") and not tree.split_children(path):  # kernels read convolutions' weights
            for name in wanted:
                if tree.style(f"{path}.{name}") is None:
                    yield f"{path}.{name}", BareParameter(gathered=True)


def _reads_whole(path: str, module: Any, tree: Tree) -> bool:
    """Whether a layer's input is surely whole: nothing beside it is split, or it reads what the split layers read."""
    parent = path.rpartition(".")[0]
    split = tree.split_children(parent)
    return all(size_of(tree.module(parent, name), 1) == module.in_features for name in split)
