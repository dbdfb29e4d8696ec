"""Who reduces the logits and writes their gradients: torch's own operations, or Triton kernels where asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch

from rl_logprobs import softmax
from rl_logprobs.errors import OptionError

Backend = Literal["torch", "triton"]

#: The environment variable that says which backend serves calls that name none.
VARIABLE = "RL_LOGPROBS_BACKEND"


class Kernels(NamedTuple):
    """``column_sums`` and ``write_gradient``, as ``softmax`` describes them."""

    column_sums: Callable[..., softmax.Sums]
    write_gradient: Callable[..., None]


#: torch's own operations, which run everywhere.
TORCH = Kernels(softmax.column_sums, softmax.write_gradient)


def kernels(backend: Backend | None, device: torch.device) -> Kernels:
    """The functions of a backend for logits on a device.

    Args:
        backend: None for what the environment variable ``RL_LOGPROBS_BACKEND`` says, or else torch.
        device: where the logits are.

    Raises:
        OptionError: an unknown backend, or Triton where it is not installed or cannot run.
    """
    chosen = backend or os.environ.get(VARIABLE) or "torch"
    if chosen not in get_args(Backend):
        raise OptionError(f"backend must be one of {', '.join(get_args(Backend))}, got {chosen!r}")
    if chosen == "torch":
        return TORCH
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise OptionError(
            f"backend 'triton' needs logits on a GPU, these are on {device}; leave backend out (or set "
            f"TRITON_INTERPRET=1 to try the kernels in Triton's slow interpreter)"
        )
    try:
        from rl_logprobs import triton_softmax
    except ImportError as error:
        raise OptionError("backend 'triton' needs Triton: pip install triton, or leave backend out") from error
    return Kernels(triton_softmax.column_sums, triton_softmax.write_gradient)
