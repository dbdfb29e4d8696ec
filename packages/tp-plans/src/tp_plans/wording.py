"""Styles and sizes as people read them."""

from __future__ import annotations

from tp_plans.styles import Style, style_to_dict


def brief(style: Style) -> str:
    """A style with those fields only that say something: ``ColwiseParallel(unit=head_dim)``."""
    data = style_to_dict(style)
    fields = ", ".join(f"{name}={_value(value)}" for name, value in data.items() if name != "style")
    return f"{data['style']}({fields})"


def readable_bytes(size: float) -> str:
    """A number of bytes in the unit that keeps it short: ``1.5 GB``."""
    for name in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {name}"
        size /= 1000
    return f"{size:.3g} TB"


def _value(value: object) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, list) else str(value)
