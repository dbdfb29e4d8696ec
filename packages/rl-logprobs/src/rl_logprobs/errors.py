"""Errors of this package: one base class, and each also a subclass of the matching built-in error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__``; its error states the present place of a former name."""

    def fail(name: str) -> NoReturn:
        place = f"; use {names[name]}" if name in names else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{place}")

    return fail


if not TYPE_CHECKING:
    __getattr__ = former_names(__name__, {"SupportError": "rl_logprobs.errors.KeptTokensError"})


class LogprobsError(Exception):
    """Base class of all errors of this package."""


class ShapeError(LogprobsError, ValueError):
    """Shapes, widths or token counts contradict each other."""


class PlacementError(LogprobsError, ValueError):
    """The placements of a DTensor are not supported by the function."""


class DtypeError(LogprobsError, TypeError):
    """A tensor has the wrong dtype or layout."""


class OptionError(LogprobsError, ValueError):
    """An option is outside its range, or options contradict each other."""


class TargetError(LogprobsError, IndexError):
    """A target is outside the vocabulary or outside its kept set."""


class KeptTokensError(LogprobsError, ValueError):
    """A kept set is empty at a scored token, contains an id twice, or an id outside the vocabulary."""


class NonFiniteNormError(LogprobsError, RuntimeError):
    """The gradient norm is infinite or NaN, and the caller asked for an error."""
