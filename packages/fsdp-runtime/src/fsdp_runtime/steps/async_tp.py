"""Async tensor parallelism: matrix products overlap with the collectives of sequence parallelism, by the compiler.

Inductor splits an all-gather before a product and a reduce-scatter after one, the collectives of sequence parallelism,
into pipelines over symmetric memory (torchtitan's "async TP"; CUDA with peer access between the ranks).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._torch_compat import MICRO_PIPELINE
from fsdp_runtime.errors import BackendError, OptionError


def async_compile_options(
    tp_mesh: DeviceMesh | None, compile_options: Mapping[str, Any], *, sequence_parallel: bool
) -> dict[str, Any]:
    """Return the keywords of ``torch.compile`` for async tensor parallelism; raise where nothing would overlap."""
    if tp_mesh is None or not sequence_parallel:
        raise OptionError(
            "async_tensor_parallel overlaps the collectives of sequence parallelism: it needs a mesh with tp larger "
            "than 1 and sequence_parallel=True"
        )
    options = dict(compile_options)
    if options.get("backend", "inductor") != "inductor":
        raise OptionError("async_tensor_parallel is a pass of Inductor: it needs compile=True or backend='inductor'")
    if tp_mesh.device_type != "cuda":
        raise BackendError(
            f"async_tensor_parallel needs CUDA devices with peer access, and the mesh is on {tp_mesh.device_type}: "
            "leave it off, which does not change the results"
        )
    if options.get("mode") is not None:  # torch.compile takes a mode or options
        raise OptionError(
            f"async_tensor_parallel cannot be combined with mode={options['mode']!r}: give options instead of a mode"
        )
    return {**options, "options": {**options.get("options", {}), MICRO_PIPELINE: True}}
