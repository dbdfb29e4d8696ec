"""Import rl-logprobs when a trainer first needs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fsdp_runtime.errors import BackendError


def rl_logprobs() -> Any:
    """Return the package, or raise :class:`BackendError` if it is not installed."""
    try:
        return import_module("rl_logprobs")
    except ModuleNotFoundError as error:
        raise BackendError(
            "log-probabilities and gradient norms of a sharded model need rl-logprobs: "
            "pip install 'fsdp-runtime[trainer]'"
        ) from error
