"""Where an unknown decoder keeps its parts: embedding, blocks, norms and head, found by structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from tp_plans._torch_compat import own_parameters
from tp_plans.checks.tree import parent
from tp_plans.errors import PlanError


@dataclass(frozen=True)
class Anatomy:
    """The parts of a decoder, as paths.

    Args:
        modules: every module by path.
        embedding: the token embedding.
        root: the module that holds embedding and blocks.
        blocks: the blocks.
        width: features of the residual stream.
        final_norm: the norm after the last block, or ``None``.
        head: the output projection to the vocabulary, or ``None``.
    """

    modules: Mapping[str, Any]
    embedding: str
    root: str
    blocks: tuple[str, ...]
    width: int
    final_norm: str | None
    head: str | None

    @cached_property
    def children(self) -> Mapping[str, list[str]]:
        """The modules right below each."""
        children: dict[str, list[str]] = {path: [] for path in self.modules}
        for path in self.modules:
            if path:
                children[parent(path)].append(path)
        return children

    def below(self, path: str) -> Iterator[str]:
        """All modules below one."""
        for child in self.children[path]:
            yield child
            yield from self.below(child)


def anatomy_of(model: Any) -> Anatomy:
    """Find the parts of a decoder.

    Raises:
        PlanError: it has no embedding, or no list of blocks beside one.
    """
    modules = dict(model.named_modules())
    embedding = max((p for p, m in modules.items() if is_table(m)), key=lambda p: matrix(modules[p])[0], default=None)
    if embedding is None:
        raise PlanError(f"{type(model).__name__} has no embedding: suggest proposes plans for language models")
    container = _blocks(modules, embedding)
    if container is None:
        raise PlanError(f"{type(model).__name__} has no list of blocks (children named 0, 1, 2) to make a plan of")
    root = ".".join(_common(embedding, container))
    vocab, width = matrix(modules[embedding])
    return Anatomy(
        modules=modules,
        embedding=embedding,
        root=root,
        blocks=tuple(path for path in modules if parent(path) == container and path != container),
        width=width,
        final_norm=_final_norm(modules, root, container, width),
        head=_head(modules, embedding, container, vocab, width),
    )


def is_table(module: Any) -> bool:
    """Whether a module is an embedding."""
    named = hasattr(module, "num_embeddings") or "Embedding" in type(module).__name__
    return named and len(matrix(module)) == 2


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer, whose forward is a product with its weight and nothing else."""
    bases = type(module).__mro__
    own = next((base.__name__ for base in bases if "forward" in vars(base)), "Linear")
    is_product = own in ("Linear", "_Parallel")  # the latter runs the forward of the class that it is mixed into
    return is_product and any(base.__name__ == "Linear" for base in bases) and len(matrix(module)) == 2


def is_norm(module: Any, width: int) -> bool:
    """Whether a module scales so many features: all it has is vectors as long."""
    vectors = parameters_of(module)
    return bool(vectors) and all(tuple(vector.shape) == (width,) for vector in vectors.values())


def matrix(module: Any) -> tuple[int, ...]:
    """The shape of a module's weight; empty where it has none."""
    weight = own_parameters(module).get("weight")
    return () if weight is None else tuple(map(int, weight.shape))


def parameters_of(module: Any) -> dict[str, Any]:
    """A module's own parameters."""
    return {name: parameter for name, parameter in own_parameters(module).items() if parameter is not None}


def _blocks(modules: Mapping[str, Any], embedding: str) -> str | None:
    """The list of the most parameters, of those nearest to the embedding in the tree."""
    sizes: dict[str, int] = {}
    for path, module in modules.items():
        size = sum(prod(parameter.shape) for parameter in parameters_of(module).values())
        for container in _lists(path):
            sizes[container] = sizes.get(container, 0) + size
    outermost = [path for path in sizes if not any(path != other and path.startswith(f"{other}.") for other in sizes)]
    return max(outermost, key=lambda path: (len(_common(embedding, path)), sizes[path]), default=None)


def _lists(path: str) -> Iterator[str]:
    """The lists that a module is in: what is above a number."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit() and index:
            yield ".".join(parts[:index])


def _common(first: str, second: str) -> list[str]:
    """The parts of the path of the module nearest above both."""
    shared = []
    for one, other in zip(first.split(".")[:-1], second.split("."), strict=False):
        if one != other:
            break
        shared.append(one)
    return shared


def _final_norm(modules: Mapping[str, Any], root: str, container: str, width: int) -> str | None:
    after = list(modules)[list(modules).index(container) :]
    norms = [path for path in after if parent(path) == root and is_norm(modules[path], width)]
    return norms[-1] if norms else None


def _head(modules: Mapping[str, Any], embedding: str, container: str, vocab: int, width: int) -> str | None:
    """The linear layer outside the blocks with a row for every id; the last where there are several."""
    heads = [
        path
        for path, module in modules.items()
        if matrix(module) == (vocab, width) and path != embedding and not path.startswith(f"{container}.")
    ]
    return heads[-1] if heads else None
