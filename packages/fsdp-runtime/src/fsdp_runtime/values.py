"""Checks of the values of options, for all steps."""

from __future__ import annotations

from collections.abc import Collection

from fsdp_runtime.errors import OptionError


def require_one_of(name: str, value: object, allowed: Collection[object], *, or_else: str = "") -> None:
    """Check that an option has one of its values."""
    if value not in allowed:
        values = ", ".join(map(repr, allowed))
        raise OptionError(f"{name}={value!r}: write one of {values}{or_else}")
