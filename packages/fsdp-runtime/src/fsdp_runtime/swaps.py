"""Attributes that have other values for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of an object other values inside the ``with``."""
    # A class keeps a static method in its dict; ``getattr`` returns the function inside of it.
    of_class = vars(owner) if isinstance(owner, type) else {}
    earlier = {name: of_class[name] if name in of_class else getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in earlier.items():
            setattr(owner, name, value)
