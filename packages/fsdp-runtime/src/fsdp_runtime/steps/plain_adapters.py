"""Adapters that shards cannot compute: merged ones, and other kinds than plain LoRA."""

from __future__ import annotations

from typing import NoReturn

from fsdp_runtime.errors import OptionError


def refuse_adapters(path: str, reason: str) -> NoReturn:
    """Refuse the adapters of a layer or of stacked experts."""
    raise OptionError(
        f"{path} carries adapters that are merged, or not plain LoRA on a linear layer or on stacked experts "
        f"({reason}): unmerge them, or leave it out of target_modules and target_parameters"
    )
