"""Validate arguments of functions: integers, models, sizes of an axis."""

from __future__ import annotations

from typing import Any, TypeGuard

from tp_plans.errors import ModelError, PlanError

#: No mesh axis is larger; lists with an entry per rank would not end.
MAX_RANKS = 2**20


def is_integer(value: object, *, least: int | None = None) -> TypeGuard[int]:
    """Return whether a value is an integer, not a boolean, and not below ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def require_model(value: Any) -> None:
    """Raise :class:`ModelError` unless a value answers as a ``torch.nn.Module`` does."""
    if isinstance(value, type) or not hasattr(value, "named_modules"):
        raise ModelError(
            f"{value!r} is not a model: give a torch.nn.Module, of any library; one built on the meta device is enough"
        )


def require_size(tp: object, error: type[Exception] = PlanError) -> None:
    """Raise ``error`` unless ``tp`` is the size of an axis."""
    if not is_integer(tp, least=1):
        raise error(f"tp is {tp!r}: give the axis's size, 1 or more")
    if tp > MAX_RANKS:
        raise error(f"tp is {tp!r}: give the axis's size, at most {MAX_RANKS}")
