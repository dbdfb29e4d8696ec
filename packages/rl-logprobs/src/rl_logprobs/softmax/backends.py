"""Choose the kernels that reduce logits and write their gradients: torch's operations, or Triton on request."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch

from rl_logprobs.errors import OptionError
from rl_logprobs.softmax import torch_kernels
from rl_logprobs.softmax.partial_softmax import PartialSoftmax

Backend = Literal["torch", "triton"]

#: The environment variable that names the backend of calls that pass none.
VARIABLE = "RL_LOGPROBS_BACKEND"


class Kernels(NamedTuple):
    """``reduce_logits`` and ``write_gradient`` with the signatures of those in ``torch_kernels``."""

    reduce_logits: Callable[..., PartialSoftmax]
    write_gradient: Callable[..., None]


#: torch's own operations, which run on every device.
TORCH = Kernels(torch_kernels.reduce_logits, torch_kernels.write_gradient)


def kernels(backend: Backend | None, device: torch.device) -> Kernels:
    """Return the kernels of a backend; None is that of the variable ``RL_LOGPROBS_BACKEND``, or torch."""
    chosen = backend if backend is not None else os.environ.get(VARIABLE) or "torch"
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
        from rl_logprobs.softmax import triton_backend
    except ImportError as error:
        raise OptionError("backend 'triton' needs Triton: pip install triton, or leave backend out") from error
    return Kernels(triton_backend.reduce_logits, triton_backend.write_gradient)
