"""The errors of this package; every message names the pattern or module and the fix."""

from __future__ import annotations

__all__ = [
    *("AlreadyParallelizedError", "CapabilityError", "CheckFailedError", "CustomPlanError", "LayoutError"),
    *("ModelConfigError", "ModelError", "PlanError", "TpPlansError", "TransferError"),
    *("UnknownArchitectureError", "UnknownStyleError"),
]


def type_name(value: object) -> str:
    """Return the type of a value for messages: with its module unless it is built in, since short names are shared."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


class TpPlansError(Exception):
    """Base class of every error that this package raises on purpose."""


class PlanError(TpPlansError, ValueError):
    """A plan, a pattern or a style is malformed."""


class UnknownStyleError(PlanError):
    """A style word that no table knows."""


class CustomPlanError(PlanError):
    """A user's plan (a dict, or a dotted path to one) cannot be used."""


class UnknownArchitectureError(TpPlansError, LookupError):
    """No plan is known for an architecture."""


class ModelConfigError(TpPlansError, ValueError):
    """No model can be built from a config."""


class ModelError(TpPlansError, ValueError):
    """The given object is not a model."""


class CapabilityError(TpPlansError, ValueError):
    """An architecture has no such form; the message says why."""


class CheckFailedError(TpPlansError, ValueError):
    """A plan does not fit a model; the message lists every finding at once."""


class LayoutError(TpPlansError, ValueError):
    """A module would train wrongly with the layout of a tensor that it was given."""


class TransferError(TpPlansError, ValueError):
    """A transfer between two layouts of weights is not possible, or a layout is malformed."""


class AlreadyParallelizedError(TpPlansError, RuntimeError):
    """A style was applied to a module that already carries one."""
