"""The CPU as a platform of verl 0.9, for recipes on a laptop.

``VERL_USE_EXTERNAL_MODULES=with_verl.cpu_platform`` registers it, and nothing else does: verl takes a
registered CPU platform on every machine without a GPU, also on the driver nodes of a GPU cluster.  verl imports this
file during its own import, so that this file imports no unused part of verl.
"""

from __future__ import annotations

import os
import types
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(types.ModuleType):
    """``torch.cpu`` with ``torch.cuda``'s functions that verl calls: uncounted memory, and the CPU's random numbers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = staticmethod(lambda *_: 0)
    mem_get_info = staticmethod(lambda *_: (0, 0))
    reset_peak_memory_stats = empty_cache = ipc_collect = set_device = staticmethod(lambda *_: None)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    get_device_name = staticmethod(lambda *_: "cpu")


def _returns(value: Any) -> Any:
    """Return a method that returns a value for all arguments."""
    return lambda self, *args, **kwargs: value


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """One device, ``cpu``, with gloo, and the resource that Ray counts as a GPU."""

    device_name = vendor_name = "cpu"
    device_module = _Device("cpu_device")
    is_available = _returns(True)
    device_count = _returns(1)
    current_device = _returns("cpu")  # verl passes it to ``Tensor.to``, where an integer is a GPU
    get_device_capability = _returns((None, None))
    communication_backend_name = _returns("gloo")
    visible_devices_envvar = _returns("CPU_VISIBLE_DEVICES")  # nothing reads it
    ray_noset_envvars = _returns([])
    ray_resource_name = _returns("GPU")  # verl counts these; ``ray.init(num_gpus=...)`` declares one for each rank
    is_ipc_supported = _returns(False)  # weights go through host memory
    nvtx_range = _returns(nullcontext())
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    set_device = synchronize = set_allocator_settings = empty_cache = _returns(None)
    cudart = profiler_start = profiler_stop = _returns(None)

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        """Return Ray's options, the same as for GPUs."""
        return {"num_gpus": num_gpus}


def use_gloo_alone() -> None:
    """Initialize process groups with ``gloo``: torch refuses verl's ``cpu:gloo,cpu:gloo``, one device named twice."""
    from verl.utils import distributed

    by_ray = distributed.initialize_global_process_group_ray

    def from_torchrun(timeout_second: int = 36000) -> tuple[int, int, int]:
        address, timeout = os.environ.get("DIST_INIT_METHOD"), timedelta(seconds=timeout_second)
        torch.distributed.init_process_group("gloo", init_method=address, timeout=timeout)
        return int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def from_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        by_ray(timeout_second, backend or "gloo")

    distributed.initialize_global_process_group = from_torchrun
    distributed.initialize_global_process_group_ray = from_ray  # before verl.workers.engine_workers imports it


use_gloo_alone()
