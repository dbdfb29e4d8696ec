"""Typed errors: one base class, and the built-in class that callers would otherwise have caught."""

from __future__ import annotations


class LogprobsError(Exception):
    """Base of every error that this package raises on purpose."""


class ShapeError(LogprobsError, ValueError):
    """Shapes, widths or token counts that do not fit each other."""


class PlacementError(LogprobsError, ValueError):
    """A DTensor that lies across the mesh in a way that the function cannot use."""


class DtypeError(LogprobsError, TypeError):
    """A tensor of the wrong element type."""


class OptionError(LogprobsError, ValueError):
    """An option outside its range, or options that contradict each other."""


class TargetError(LogprobsError, IndexError):
    """A target outside the vocabulary."""


class NonFiniteNormError(LogprobsError, RuntimeError):
    """The gradient norm is infinite or NaN and the caller asked for an error."""
