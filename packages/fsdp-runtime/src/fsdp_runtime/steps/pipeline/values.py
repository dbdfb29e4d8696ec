"""Tensors that cross from one stage to the next, named by the block and their place in its inputs or outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fsdp_runtime._torch_compat import local_tensor

#: The keys and indices from a nest of containers to one of its tensors.
Path = tuple[Any, ...]
Place = Literal["input", "output", "entry"]


@dataclass(frozen=True, order=True)
class Value:
    """A tensor of one block's call."""

    block: int  # in the order of calls
    place: Place  # ``"entry"``: the block adds it to a dict or list that it is called with
    path: Path

    def __str__(self) -> str:
        keys = ".".join(str(key) for key in self.path[self.place != "output" :]) or "first"
        return f"{self.place} {keys} of block {self.block}"


@dataclass(frozen=True)
class Leaf:
    """The place of a tensor in a skeleton."""

    path: Path


def tensors_in(nest: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors of nested dicts, lists and tuples with their paths."""
    if isinstance(nest, Tensor):
        yield path, nest
    elif isinstance(nest, Mapping | list | tuple):
        for key, value in nest.items() if isinstance(nest, Mapping) else enumerate(nest):
            yield from tensors_in(value, (*path, key))


def at(nest: Any, path: Path) -> Any:
    """Return the part of a nest at a path."""
    for key in path:
        nest = nest[key]
    return nest


def with_tensor(nest: Any, path: Path, tensor: Tensor) -> Any:
    """Put a tensor at a path; dicts and lists are changed in place, tuples are replaced."""
    if not path:
        return tensor
    part = with_tensor(nest[path[0]], path[1:], tensor)
    if isinstance(nest, tuple):
        return _like(nest, [part if index == path[0] else value for index, value in enumerate(nest)])
    nest[path[0]] = part
    return nest


def skeleton_of(nest: Any) -> Any:
    """Return a copy of a nest with a :class:`Leaf` in the place of each tensor."""
    return _mapped(nest, lambda path, leaf: Leaf(path) if isinstance(leaf, Tensor) else leaf)


def filled(skeleton: Any, tensor: Callable[[Path], Tensor]) -> Any:
    """Return a copy of a skeleton with tensors in the place of its leaves."""
    return _mapped(skeleton, lambda _, leaf: tensor(leaf.path) if isinstance(leaf, Leaf) else leaf)


def _mapped(nest: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a copy of a nest with the function's result of each leaf and its path."""
    if isinstance(nest, Mapping):
        return type(nest)({key: _mapped(value, function, (*path, key)) for key, value in nest.items()})  # type: ignore[call-arg]
    if isinstance(nest, list | tuple):
        return _like(nest, [_mapped(value, function, (*path, index)) for index, value in enumerate(nest)])
    return function(path, nest)


def equal(tensor: Tensor | None, expected: Tensor | None) -> bool:
    """Return whether both tensors exist, with equal shapes and values on this rank."""
    if tensor is None or expected is None:
        return False
    return tensor.shape == expected.shape and torch.equal(local_tensor(tensor), local_tensor(expected))


def _like(nest: Any, values: list[Any]) -> Any:
    return type(nest)(values) if type(nest) in (list, tuple) else type(nest)(*values)  # a named tuple
