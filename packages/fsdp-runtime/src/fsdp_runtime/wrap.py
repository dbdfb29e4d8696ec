"""The one place that puts code in front of the forward of a user's module.

A wrapper is a class that is mixed in before the module's own.  A class rather than hooks or a replaced ``forward``:
``torch.compile`` guards on the ids of hooks, which differ from block to block; an interrupt skips hooks; ``deepcopy``
keeps a class and copies no state with it.  Tensor parallelism and FSDP2 add classes of their own in the same way, so
the order of the steps is the order of the wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar

from torch import nn


class Wrapper:
    """Mixed in before a module's class; its ``forward`` calls ``super().forward``."""

    #: The effect on the module, for ``describe_parallelism``.
    effect: ClassVar[str] = ""


def wrap(modules: Iterable[nn.Module], wrapper: type[Wrapper], **attributes: Any) -> None:
    """Mix a wrapper in before the classes of modules, in place.

    Modules of one class get one new class, so that equal blocks are compiled once.  It keeps the old name, by which
    transformers finds what to record.

    Args:
        modules: those that do not have the wrapper yet.
        wrapper: the class to mix in.
        attributes: further attributes of the new classes.
    """
    made: dict[type, type[nn.Module]] = {}
    for module in modules:
        cls: Any = type(module)
        if cls not in made:
            made[cls] = _with_wrapper(cls, wrapper, attributes) if attributes else _shared(cls, wrapper)  # type: ignore[arg-type]  # mypy: a class is hashable
        module.__class__ = made[cls]


def is_wrapped(module: nn.Module, wrapper: type[Wrapper]) -> bool:
    """Return True if a wrapper stands in front of a module's forward."""
    return isinstance(module, wrapper)


def effects_of(module: nn.Module) -> tuple[str, ...]:
    """Return the effects of a module's wrappers, the outermost first."""
    found = (vars(cls).get("effect") for cls in type(module).__mro__ if issubclass(cls, Wrapper))
    return tuple(effect for effect in found if effect)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """Put a forward on one instance, whose class stays; return the one that other code had put there, if any."""
    replaced: Callable[..., Any] | None = module.__dict__.get("forward")
    module.forward = forward
    return replaced


def restore_forward(module: nn.Module, replaced: Callable[..., Any] | None) -> None:
    """Undo :func:`replace_forward`, which returned ``replaced``."""
    del module.__dict__["forward"]
    if replaced is not None:
        module.forward = replaced


@cache
def _shared(cls: Any, wrapper: type[Wrapper]) -> type[nn.Module]:
    return _with_wrapper(cls, wrapper, {})


def _with_wrapper(cls: type, wrapper: type[Wrapper], attributes: dict[str, Any]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (wrapper, cls), {**names, **attributes})
