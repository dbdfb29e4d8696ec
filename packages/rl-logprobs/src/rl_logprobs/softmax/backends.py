"""Choose between torch's operators and Triton's kernels for the tensors of a device."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from typing import Literal, get_args

import torch

from rl_logprobs.errors import OptionError
from rl_logprobs.tensors import is_accelerator_assumed

Backend = Literal["torch", "triton"]

#: The environment variable that names the backend of calls that pass none.
VARIABLE = "RL_LOGPROBS_BACKEND"

_log = logging.getLogger(__name__)


def chosen_backend(backend: Backend | None, device: torch.device) -> Backend:
    """Return the backend of a call on a device's tensors; for None ``RL_LOGPROBS_BACKEND``'s, or the default."""
    chosen = backend if backend is not None else os.environ.get(VARIABLE) or None
    if chosen is None:
        return "triton" if is_accelerator_assumed() or (device.type == "cuda" and _triton_imports()) else "torch"
    if chosen not in get_args(Backend):
        raise OptionError(f"backend must be one of {', '.join(get_args(Backend))}, got {chosen!r}")
    if chosen == "torch":
        return "torch"
    if is_accelerator_assumed():
        return "triton"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise OptionError(
            f"backend 'triton' needs logits on a GPU, these are on {device}; leave backend out (or set "
            f"TRITON_INTERPRET=1 to try the kernels in Triton's slow interpreter)"
        )
    try:
        import_module("triton")
    except ImportError as error:
        raise OptionError("backend 'triton' needs Triton: pip install triton, or leave backend out") from error
    return "triton"


def runs_triton(device: torch.device) -> bool:
    """Return whether a call without ``backend=`` runs Triton's kernels on a device's tensors."""
    # Unlike ``chosen_backend`` it takes the variable for the devices that can run Triton.
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    runs = device.type == "cuda" or interpreted or is_accelerator_assumed()
    return runs and chosen_backend(None, device) == "triton"


def kernels_check(device: torch.device) -> bool:
    """Return whether Triton's kernels check the targets; a CPU, which waits for nothing, checks them first."""
    return device.type != "cpu"


@cache
def _triton_imports() -> bool:
    try:
        import_module("triton")
    except Exception as error:  # noqa: BLE001  # a broken installation is as good as none
        _log.warning(
            "Triton cannot be imported (%s): torch's operators serve this GPU, at a tenth of the rate; install triton",
            error,
        )
        return False
    return True
