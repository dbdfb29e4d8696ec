"""Approximate memory of a GPU process besides its tensors: these numbers do not come from a trace.

Sources: two reports of failed allocations among prime-rl's benchmarks of January 2026 state the memory of the process
beside the allocator's: 1.21 GiB more on one H100, 2.27 GiB more on one of eight B200 (context, kernels of torch,
cuBLAS, attention and Triton, and NCCL of one communicator).  cuBLAS takes its workspace from the allocator: 32 MiB for
a handle on compute capability 9 (torch's ``CUBLAS_WORKSPACE_CONFIG``), one handle in forward and one in backward.
"""

from __future__ import annotations

from collections.abc import Collection

from fsdp_runtime.errors import EstimateError

#: The costs that can be counted.
CONSTANTS = ("context", "nccl", "cublas")
#: Bytes of cuBLAS's workspaces, which its handles in forward and in backward take from the allocator.
WORKSPACES = (32 * 2**20,) * 2

_CONTEXT = round(1.2 * 2**30)
#: Channels of a communicator inside a node, and bytes of one: a buffer of 4 MiB (``NCCL_BUFFSIZE``) and buffers of
#: the two low-latency protocols, to send and to receive.
_CHANNELS = 24
_CHANNEL_BYTES = 2 * (4 * 2**20 + 2**20 + 2**18 * 8)


def constant_costs(counted: Collection[str], *, world_size: int, axes: int) -> dict[str, int]:
    """Return bytes outside of the allocator by name, with a communicator for each of ``axes`` groups of ranks."""
    if unknown := [name for name in counted if name not in CONSTANTS]:
        raise EstimateError(f"constants={unknown}: the constant costs are {', '.join(CONSTANTS)}")
    costs = {}
    if "context" in counted:
        costs["context"] = _CONTEXT
    if "nccl" in counted and world_size > 1:
        costs["nccl"] = max(axes, 1) * _CHANNELS * _CHANNEL_BYTES
    return costs
