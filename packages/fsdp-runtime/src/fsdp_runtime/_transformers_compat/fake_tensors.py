"""Fake tensors in the place of data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fake_tensors_are_data() -> Iterator[None]:
    """Let transformers treat fake tensors as tensors with data, as it does in training."""
    # It takes them for a graph being traced, and then builds attention masks that a real run finds it can do without.
    if (utilities := sys.modules.get("transformers.utils.import_utils")) is None:
        yield
        return
    asks = getattr(utilities, "is_fake_tensor", None)
    setattr(utilities, "is_fake_tensor", lambda _tensor: False)  # noqa: B010  # a module has no such attribute to mypy
    try:
        yield
    finally:
        setattr(utilities, "is_fake_tensor", asks)  # noqa: B010
