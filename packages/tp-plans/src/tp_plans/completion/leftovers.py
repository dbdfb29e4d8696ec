"""What no sub-layer's structure explains: stored split, and used whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from tp_plans.completion.tree import Tree, agreed, is_linear, parameters_of, size_of, with_ancestors
from tp_plans.layouts import Replicate, Shard
from tp_plans.patterns import wildcard
from tp_plans.styles import (
    ColwiseParallel,
    GatheredParameters,
    NoParallel,
    ParallelAttention,
    ParameterStyle,
    Style,
    VocabParallelEmbedding,
)

#: The share of the model from which a parameter, of all blocks together, is worth a gather of its own.
LARGE = 0.003

#: Layers whose weight the kernels of Mamba and its kin take as an argument, in place of calling the layer.
KERNEL_ARGUMENTS = ("out_proj", "dt_proj")

#: The least number of rows that are split: fewer (a router's experts) leave ranks of a large axis empty.
ROWS = 16


def stored_split(tree: Tree) -> Mapping[str, Style]:
    """Rules for the large parameters that the plan leaves whole."""
    sizes: dict[str, int] = defaultdict(int)
    total = 0
    for path, module in tree.modules.items():
        for name, parameter in parameters_of(module).items():
            sizes[wildcard(f"{path}.{name}")] += prod(parameter.shape)
            total += prod(parameter.shape)
    large = {pattern for pattern, size in sizes.items() if size >= LARGE * total}
    return agreed(_stored_split(tree, large), tree)


def inside_tables(tree: Tree) -> Mapping[str, Style]:
    """Rules for what works inside a split embedding, and so sees the ids of its rank only."""
    return agreed(_inside_tables(tree), tree)


def _stored_split(tree: Tree, large: set[str]) -> Iterator[tuple[str, Style]]:
    for path, module in tree.inside():
        if (names := _read_by_kernels(path, tree)) and tree.style(path) is None:
            yield path, GatheredParameters(names=names)
        if tree.style(path) is not None and not isinstance(tree.style(path), ParallelAttention):
            continue
        parent, _, own = path.rpartition(".")
        wanted = [
            name
            for name, parameter in parameters_of(module).items()
            if wildcard(f"{path}.{name}") in large and parameter.ndim > 1 and max(parameter.shape) >= ROWS
        ]
        if not wanted or f"{own}.weight" in _read_by_kernels(parent, tree) or tree.is_gathered(f"{path}.{wanted[0]}"):
            continue
        if is_linear(module) and wanted == ["weight"]:
            if module.out_features >= ROWS and _reads_whole(path, module, tree):
                yield path, ColwiseParallel(output_layouts=Replicate())
        elif hasattr(module, "num_embeddings"):
            yield path, VocabParallelEmbedding()
        elif not tree.split_children(path) and not hasattr(module, "kernel_size"):
            for name in wanted:
                if tree.style(f"{path}.{name}") is None:
                    shape = list(parameters_of(module)[name].shape)
                    yield f"{path}.{name}", ParameterStyle(layout=Shard(shape.index(max(shape))), gathered=True)


def _read_by_kernels(path: str, tree: Tree) -> tuple[str, ...]:
    """The weights of its layers that a recurrence with a convolution reads itself."""
    children = tree.children[path]
    if not any(hasattr(tree.module(path, name), "kernel_size") for name in children):
        return ()
    return tuple(
        f"{name}.weight" for name in KERNEL_ARGUMENTS if name in children and tree.style(f"{path}.{name}") is None
    )


def _inside_tables(tree: Tree) -> Iterator[tuple[str, Style]]:
    for path, module in tree.inside():
        parent = path.rpartition(".")[0]
        if isinstance(tree.style(parent), VocabParallelEmbedding) and parameters_of(module):
            yield path, NoParallel(gradient="partial")


def _reads_whole(path: str, module: Any, tree: Tree) -> bool:
    """Whether a layer surely works on whole activations: nothing beside it is split, or it feeds what is.

    A column-wise layer sums the gradient of its input, so that of a layer before it is whole again.
    """
    parent, _, _ = path.rpartition(".")
    split = tree.split_children(parent)
    if split:
        return module.out_features in {size_of(tree.module(parent, name), 1) for name in split}
    return not any(tree.split_children(above) for above in with_ancestors(parent))
