"""Devices that users name."""

from __future__ import annotations

import torch

from fsdp_runtime.errors import OptionError
from fsdp_runtime.mesh.spec import default_device_type


def require_device(device: torch.device | str) -> torch.device:
    """Return a device that a user named.

    Args:
        device: a device, or its name, such as ``"cuda:1"``.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"device={device!r} is not the name of a device, such as 'cpu' or 'cuda:1'") from error
    usable = {"cpu", default_device_type()}
    if found.type not in usable:
        raise OptionError(f"device={str(device)!r}: this machine has {' and '.join(sorted(usable))}")
    return found
