"""Validate the fields of styles."""

from __future__ import annotations

from typing import Any

from tp_plans._validate import is_integer
from tp_plans.errors import PlanError
from tp_plans.layouts import Replicate, Shard


def require(style: Any, field: str, allowed: bool, values: str) -> None:
    """Raise :class:`PlanError` unless ``allowed``, with the field's value and the values that it takes."""
    if not allowed:
        raise PlanError(f"{type(style).__name__}.{field} is {getattr(style, field)!r}: write {values}")


def require_layout(style: Any, field: str, *kinds: type) -> None:
    """Raise unless a field holds a layout of one of ``kinds``, by default one that a full tensor can take."""
    kinds = kinds or (Replicate, Shard)
    written = [f"{kind.__name__}({'dim' if kind is Shard else ''})" for kind in kinds]
    require(style, field, isinstance(getattr(style, field), kinds), " or ".join(written))


def require_argument(style: Any) -> None:
    """Raise unless the fields ``argument`` and ``position`` name an argument of a forward."""
    require(
        style,
        "argument",
        is_attribute(style.argument) and "." not in style.argument,
        "the keyword's name, as 'hidden_states'",
    )
    require(style, "position", style.position is None or is_integer(style.position, least=0), "0 or more, or None")


def require_flag(style: Any, field: str) -> None:
    """Raise unless a field holds a boolean."""
    require(style, field, isinstance(getattr(style, field), bool), "True or False")


def require_multiple_of(style: Any, field: str, *, least: int = 1) -> None:
    """Raise unless a field holds a number of features, or the name of an attribute that does."""
    value = getattr(style, field)
    values = f"{least} or more features, or the name of an attribute of the parent module, as 'head_dim'"
    require(style, field, is_integer(value, least=least) or _is_number_or_attribute(value), values)


def require_fused_sizes(style: Any, field: str) -> None:
    """Raise unless a field holds the sizes of fused matrices: none, or two and more."""
    value = getattr(style, field)
    sizes = isinstance(value, tuple) and len(value) != 1 and all(map(_is_number_or_attribute, value))
    require(style, field, sizes, "a tuple of two or more numbers or attributes' names, as (1, 1)")


def require_attributes(style: Any, field: str) -> None:
    """Raise unless a field holds attributes' names."""
    value = getattr(style, field)
    named = isinstance(value, tuple) and all(map(is_attribute, value))
    require(style, field, named, "a tuple of attributes' names, as ('num_heads', 'config.num_heads')")


def is_attribute(value: object) -> bool:
    """Return whether a value names an attribute, or an attribute's attribute, as ``"config.num_attention_heads"``."""
    return isinstance(value, str) and all(part.isidentifier() for part in value.split("."))


def _is_number_or_attribute(value: object) -> bool:
    return is_integer(value, least=1) or is_attribute(value)
