"""A CPU PlatformBase for verl 0.9.1, registered from outside."""

import types
from contextlib import contextmanager

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_module = types.ModuleType("with_verl.cpu_device")


def _getattr(name):
    return getattr(torch.cpu, name)


_module.__getattr__ = _getattr
_module.memory_allocated = lambda *a: 0
_module.memory_reserved = lambda *a: 0
_module.max_memory_allocated = lambda *a: 0
_module.max_memory_reserved = lambda *a: 0
_module.reset_peak_memory_stats = lambda *a: None
_module.mem_get_info = lambda *a: (0, 0)
_module.empty_cache = lambda: None
_module.set_device = lambda index: None
_module.get_rng_state = lambda *a: torch.get_rng_state()
_module.set_rng_state = lambda state, *a: torch.set_rng_state(state)
_module.manual_seed = torch.manual_seed
_module.manual_seed_all = torch.manual_seed
_module.ipc_collect = lambda: None
_module.get_device_name = lambda *a: "cpu"


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _module

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"  # NOT an int: tensor.to(0) is cuda:0

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"  # declared to ray.init(num_gpus=...)

    def ray_noset_envvars(self):
        return []

    def ray_resource_options(self, num_gpus):
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


def patch_process_group():
    """verl/utils/distributed.py:61,88 build "cpu:gloo,cpu:gloo", which torch refuses (duplicate device type)."""
    import os
    from datetime import timedelta

    import verl.utils.distributed as d

    def initialize_global_process_group(timeout_second=36000):
        torch.distributed.init_process_group(
            "gloo", timeout=timedelta(seconds=timeout_second), init_method=os.environ.get("DIST_INIT_METHOD")
        )
        return int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    original = d.initialize_global_process_group_ray

    def initialize_global_process_group_ray(timeout_second=None, backend=None):
        return original(timeout_second, backend or "gloo")

    d.initialize_global_process_group = initialize_global_process_group
    d.initialize_global_process_group_ray = initialize_global_process_group_ray
