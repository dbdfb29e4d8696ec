"""Operators and storages as a dispatch mode sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # documented, in a private module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_runtime.swaps import swapped


def wraps_tensors(tensor: Tensor) -> bool:
    """Return whether a tensor subclass consists of inner tensors, as quantized weights do."""
    return is_traceable_wrapper_subclass(tensor)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        return [tree]
    from torch.utils import _pytree  # pytorch/pytorch#65761

    return _pytree.tree_leaves(tree)


@cache  # torch builds the text at each call
def operator_name(function: Any) -> str:
    """Return an operator's name without its namespace and overload, as ``"add_"`` of ``aten::add_.Tensor``."""
    return str(function.name()).split("::")[1].split(".")[0]


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an ATen operator writes into."""
    schema = func._schema
    if not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or position >= len(args) else args[position]
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def wrapper_tensor(cls: type[Any], shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Any:
    """A tensor of a subclass with a shape and no storage."""
    return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)


def storage_key(held: Tensor | UntypedStorage) -> int:
    """Return a key that a storage shares with all tensors on it, during the storage's lifetime."""
    # ``data_ptr`` is 0 for every storage without data.
    return int((held.untyped_storage() if isinstance(held, Tensor) else held)._cdata)


def observe_storage_resizes(observe: Callable[[UntypedStorage], None]) -> AbstractContextManager[None]:
    """Call ``observe`` after every ``UntypedStorage.resize_``."""
    # FSDP2 allocates and frees gathered parameters by resizing their storages. Under ``FakeTensorMode`` no operator is
    # dispatched for a resize, and torch has no hook (pytorch/pytorch#122434), so the method is replaced.
    original = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        observe(storage)
        return result

    return swapped(UntypedStorage, resize_=resize_)
