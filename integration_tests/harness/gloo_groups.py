"""Groups of gloo that cost a world of many tests little.

Each gloo group brings three threads that nothing ends before the process, and one of them, its device's, wakes up a
hundred times a second whether the group is used or not.  With shared groups but a device for each, these threads took
8 % of the CPU time of all tests.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d


def share_groups() -> None:
    """Let meshes over the same ranks use the same groups."""
    make_group, known = device_mesh.new_group, {}

    def new_group(ranks: list[int], **options: Any) -> Any:
        compared = {name: value for name, value in options.items() if name != "group_desc"}
        key = (tuple(ranks), repr(sorted(compared.items())))
        if key not in known:
            known[key] = make_group(ranks, **options)
        return known[key]

    device_mesh.new_group = new_group  # type: ignore[assignment]


def share_device() -> None:
    """Let all gloo groups that this process makes from now on use one device."""
    distributed_c10d.ProcessGroupGloo = _GlooOnOneDevice()  # type: ignore[assignment, misc]


class _GlooOnOneDevice:
    """Stands for ``ProcessGroupGloo`` in torch's module: makes groups that share a device, and knows their type."""

    def __init__(self) -> None:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        gloo = dist.ProcessGroupGloo
        self._device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()

    def __call__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **settings: object
    ) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads, options._timeout = [self._device], 2, timeout
        for name, value in settings.items():  # of torch 2.14: enable_reconfigure
            setattr(options, name, value)
        return dist.ProcessGroupGloo(store, rank, size, options)

    def __instancecheck__(self, group: object) -> bool:
        return isinstance(group, dist.ProcessGroupGloo)
