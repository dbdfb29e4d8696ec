"""Refuse to pickle a parallelized model, and ``save_pretrained`` of one: both would see one rank's shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime.errors import ModelError

_FIX = "write a checkpoint with save_weights(model, directory), or torch.save this rank's model.state_dict()"


def refuse_pickle(model: nn.Module) -> None:
    """Make ``pickle``, ``torch.save`` and ``save_pretrained`` of every sharded module raise on the rank that calls.

    ``copy.copy`` and ``copy.deepcopy`` work as before, and the copies refuse too.  ``save_pretrained`` with a
    ``state_dict`` of plain tensors is passed on.

    Args:
        model: a parallelized model; modules without DTensors do not change.
    """
    for module in model.modules():
        if _has_dtensors(module.parameters()):
            module.__dict__["__reduce_ex__"] = _Reduce(module)
            if callable(getattr(module, "save_pretrained", None)):
                module.__dict__["save_pretrained"] = _SavePretrained(module)


def _has_dtensors(values: Iterable[Any]) -> bool:
    return any(isinstance(value, DTensor) for value in values)


@dataclass(frozen=True, eq=False)
class _Reduce:
    """``__reduce_ex__`` of one module: copies are built as usual, and pickles of the constructor are refused."""

    module: nn.Module

    def __call__(self, protocol: Any) -> tuple[Any, ...]:
        reduced = object.__reduce_ex__(self.module, max(int(protocol), 2))  # (constructor, arguments, state, ...)
        return (_Constructor(type(self.module).__name__, reduced[0]), *reduced[1:])


@dataclass(frozen=True)
class _Constructor:
    """A function that builds a copy; ``copy`` calls it, and ``pickle`` asks for its name, which raises."""

    kind: str
    function: Any

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError(f"a parallelized {self.kind} cannot be pickled: its tensors are one rank's shards; {_FIX}")


@dataclass(frozen=True, eq=False)
class _SavePretrained:
    """``save_pretrained`` of one module."""

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict")
        if given is not None and not _has_dtensors(given.values()):
            kind: Any = type(self.module)
            return kind.save_pretrained(self.module, *args, **kwargs)
        raise ModelError(
            f"save_pretrained of a parallelized {type(self.module).__name__} would write one rank's shards: {_FIX}"
        )
