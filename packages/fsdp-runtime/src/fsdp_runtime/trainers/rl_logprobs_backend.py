"""What the trainers take from rl-logprobs, which is imported when it is first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from fsdp_runtime.errors import BackendError


def rl_logprobs() -> Any:
    """Return the package."""
    try:
        return import_module("rl_logprobs")
    except ModuleNotFoundError as error:
        raise BackendError(
            "log-probabilities and gradient norms of a sharded model need rl-logprobs: "
            "pip install 'fsdp-runtime[trainer]'"
        ) from error


def require_rl_logprobs() -> None:
    """Raise :class:`BackendError` unless rl-logprobs is installed."""
    rl_logprobs()


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Call ``rl_logprobs.clip_grad_norm_``."""
    norm: Tensor = rl_logprobs().clip_grad_norm_(parameters, max_norm, norm_type)
    return norm


def grad_norm(parameters: Any) -> Tensor:
    """Call ``rl_logprobs.grad_norm``."""
    norm: Tensor = rl_logprobs().grad_norm(parameters)
    return norm


def token_statistics(logits: Tensor, targets: Tensor, **options: Any) -> Any:
    """Call ``rl_logprobs.token_statistics``."""
    return rl_logprobs().token_statistics(logits, targets, **options)


def gather_sequence(local: Tensor, permutation: Tensor, group: Any, *, dim: int) -> Tensor:
    """Call ``rl_logprobs.gather_sequence``."""
    full: Tensor = rl_logprobs().gather_sequence(local, permutation, group, dim=dim)
    return full
