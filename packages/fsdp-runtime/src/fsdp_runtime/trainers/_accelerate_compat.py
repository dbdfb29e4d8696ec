"""Every use of accelerate's private API, with its reason; tested on accelerate 1.15.

``Accelerator`` keeps prepared and registered objects under private names, for its own ``save_state`` only.
"""

from __future__ import annotations

from typing import Any


def is_prepared(value: Any) -> bool:
    """Return True if an accelerator has prepared an object: it then returns the object unchanged."""
    return bool(getattr(value, "_is_accelerate_prepared", False))


def schedulers(accelerator: Any) -> list[Any]:
    """Return the schedulers that an accelerator has prepared."""
    return accelerator._schedulers


def registered_objects(accelerator: Any) -> list[Any]:
    """Return the objects given to ``register_for_checkpointing``."""
    return accelerator._custom_objects
