"""Errors of this package: one base class, and each also a subclass of the matching built-in error."""

from __future__ import annotations


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


class SupportError(LogprobsError, ValueError):
    """A kept set is empty at a scored token, contains an id twice, or an id outside the vocabulary."""


class NonFiniteNormError(LogprobsError, RuntimeError):
    """The gradient norm is infinite or NaN, and the caller asked for an error."""
