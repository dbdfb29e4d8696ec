"""Checks of the values of options, for all steps, and published rates of accelerators."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from fsdp_runtime.errors import OptionError

if TYPE_CHECKING:
    import torch

#: Dense bfloat16 operations per second of accelerators, as published by their makers, without sparsity.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "MI300X": 1307e12, "MI325X": 1307e12}
#: Short names of dtypes; torch's names are accepted too.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def require_one_of(name: str, value: object, allowed: Collection[object], *, or_else: str = "") -> None:
    """Check that the value of an option is one of the allowed values."""
    if value not in allowed:
        values = ", ".join(map(repr, allowed))
        raise OptionError(f"{name}={value!r}: write one of {values}{or_else}")


def require_bool(name: str, value: object) -> None:
    """Check that an option is ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r}: write True or False")


def require_instance(name: str, value: object, kind: type, example: str) -> None:
    """Check that an option is ``None`` or of a class."""
    if value is not None and not isinstance(value, kind):
        raise OptionError(f"{name}={value!r} is of type {type(value).__name__}: give {example} or None")


def floating_dtype(name: str, value: object) -> torch.dtype | None:
    """Return the floating dtype of an option: the option is a dtype, a dtype's name or ``None``."""
    import torch  # the command line parses its arguments before this import

    dtype = getattr(torch, DTYPES.get(value, value), None) if isinstance(value, str) else value
    if value is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return None if value is None else dtype  # type: ignore[return-value]
    raise OptionError(f"{name}={value!r}: give a floating dtype, as torch.float32, or one of {', '.join(DTYPES)}")
