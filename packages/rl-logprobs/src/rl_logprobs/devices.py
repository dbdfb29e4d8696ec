"""Devices of arguments that must agree."""

from __future__ import annotations

import torch

from rl_logprobs.errors import OptionError


def require_same_device(**tensors: torch.Tensor | None) -> None:
    """Check that tensors are on the device of the first.

    Args:
        **tensors: the tensors by their names in messages; None is left out.

    Raises:
        OptionError: one is on another device.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, expected = next((name, tensor.device) for name, tensor in given.items())
    for name, tensor in given.items():
        if tensor.device != expected:
            raise OptionError(f"{name} and {first} are on {tensor.device} and {expected}; move {name}")
