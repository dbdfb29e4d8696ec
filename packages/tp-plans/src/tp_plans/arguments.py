"""What public functions are given: refused by its type before anything of it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tp_plans.errors import ModelError, PlanError, type_name
from tp_plans.fields import is_integer

if TYPE_CHECKING:
    from tp_plans.plan import Plan


def require_model(value: Any) -> None:
    """Raise :class:`ModelError` unless a value answers as a ``torch.nn.Module`` does."""
    if isinstance(value, type) or not hasattr(value, "named_modules"):
        raise ModelError(
            f"{value!r} is no model: give a torch.nn.Module, of any library; one built on the meta device is enough"
        )


def require_plan(value: object) -> Plan:
    """The value, which is a plan.

    Raises:
        PlanError: it is something else.
    """
    from tp_plans.plan import Plan

    if not isinstance(value, Plan):
        raise PlanError(f"what is of type {type_name(value)} is no plan: make one with resolve_plan(plan, model)")
    return value


def require_size(tp: object, error: type[Exception] = PlanError) -> None:
    """Raise ``error`` unless ``tp`` is the size of an axis."""
    if not is_integer(tp, least=1):
        raise error(f"tp is {tp!r}: give the axis's size, 1 or more")
