"""Every use of what accelerate keeps to itself, with its reason; tested on accelerate 1.15.

``Accelerator`` hands what it has prepared and registered to its own ``save_state`` only, under private names.
"""

from __future__ import annotations

from typing import Any


def is_prepared(value: Any) -> bool:
    """Return True if an accelerator has prepared an object, which it then returns as it is."""
    return bool(getattr(value, "_is_accelerate_prepared", False))


def schedulers(accelerator: Any) -> list[Any]:
    """Return the schedulers that an accelerator has prepared."""
    found: list[Any] = accelerator._schedulers
    return found


def registered_objects(accelerator: Any) -> list[Any]:
    """Return what ``register_for_checkpointing`` was given."""
    found: list[Any] = accelerator._custom_objects
    return found
