"""Numbers that a style takes from the module above: ``"head_dim"``, ``"config.num_attention_heads"``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tp_plans._validate import is_integer
from tp_plans.errors import PlanError
from tp_plans.naming import HEAD_COUNTS, HEAD_DIM, KEY
from tp_plans.styles import ColwiseParallel, MLAKVProjection, ParallelAttention, RowwiseParallel, Style


def getattr_path(owner: Any, path: str) -> object:
    """The attribute at a dotted path below ``owner``, or ``None`` where there is none."""
    value = owner
    for name in path.split("."):
        try:
            value = getattr(value, name, None)
        except Exception:  # noqa: BLE001 (configs raise custom errors for numbers that differ among layers)
            return None
    return value


def key_value_heads(attention: Any, style: ParallelAttention) -> int | None:
    """The number of an attention layer's key/value heads, or ``None`` where the layer does not tell it."""
    # The size of the layer's own key projection comes first: layers of one config may have different numbers (MiMo-V2).
    # Without a key projection, and without one number in the config, the number of groups gives it.
    features, size = getattr_path(attention, f"{KEY}.out_features"), getattr_path(attention, HEAD_DIM)
    if is_integer(features, least=1) and is_integer(size, least=1) and features % size == 0:
        return features // size
    kv_heads = getattr_path(attention, style.kv_heads_attr)
    if is_integer(kv_heads, least=1):
        return kv_heads
    heads, groups = getattr_path(attention, f"config.{HEAD_COUNTS[0]}"), getattr_path(attention, style.kv_groups_attr)
    return heads // groups if is_integer(heads, least=1) and is_integer(groups, least=1) else None


def resolve_int(owner: Any, value: int | str, *, least: int = 1) -> int:
    """``value`` itself where it is a number, else the integer, ``least`` or more, that ``owner`` has of that name."""
    number = getattr_path(owner, value) if isinstance(value, str) else value
    if not is_integer(number, least=least):
        kind = "positive integer" if least else "integer"
        raise PlanError(f"{type(owner).__name__} has no {kind} {value!r} (found {number!r}): give the number itself")
    return number


def needs_parent(style: Style) -> bool:
    """Return whether a style cannot be applied without numbers of the module above its own."""
    match style:
        case ColwiseParallel(multiple_of=unit, fused_sizes=pieces, replicate_kv_heads=shared):
            return (bool(pieces) or shared) and _any_name(unit, *pieces)
        case RowwiseParallel(multiple_of=unit, fused_sizes=pieces):
            return bool(pieces) and _any_name(unit, *pieces)
        case MLAKVProjection(rope_dim=rotary):
            return _any_name(rotary)
        case _:
            return False


def _any_name(*numbers: int | str) -> bool:
    return any(isinstance(value, str) for value in numbers)


def resolve_style(style: Style, owner: Any) -> Style:
    """Return the style with the numbers of its owner, the parent module, in place of attribute names."""
    match style:
        case ColwiseParallel() | RowwiseParallel():
            pieces = tuple(resolve_int(owner, piece) for piece in style.fused_sizes)
            return replace(style, multiple_of=resolve_int(owner, style.multiple_of), fused_sizes=pieces)
        case MLAKVProjection():
            return replace(style, rope_dim=resolve_int(owner, style.rope_dim, least=0))
        case _:
            return style
