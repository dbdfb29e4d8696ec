"""Published rates of accelerators, and how much of them training reaches: the assumptions of ``step_time``.

Dense rates without sparsity and bytes per second of the memory are those of the vendors' data sheets (A100, H100, H200,
B200); links are one direction of NVLink, and 400 Gb/s a rank between nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_runtime.meters.peak_flops import PEAK_FLOPS


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of one accelerator."""

    flops: float  # operations per second of dense matrix products in bfloat16
    memory_bandwidth: float  # bytes per second of its memory
    node_bandwidth: float  # bytes per second that a rank sends inside a node
    network_bandwidth: float = 50e9  # bytes per second that a rank sends to other nodes
    memory: float = 80e9  # bytes of its memory
    node: int = 8  # ranks of a node


HARDWARE: Mapping[str, Hardware] = {
    "A100": Hardware(flops=PEAK_FLOPS["A100"], memory_bandwidth=2.04e12, node_bandwidth=300e9, network_bandwidth=25e9),
    "H100": Hardware(flops=PEAK_FLOPS["H100"], memory_bandwidth=3.35e12, node_bandwidth=450e9),
    "H200": Hardware(flops=PEAK_FLOPS["H200"], memory_bandwidth=4.8e12, node_bandwidth=450e9, memory=141e9),
    "B200": Hardware(flops=PEAK_FLOPS["B200"], memory_bandwidth=8e12, node_bandwidth=900e9, memory=192e9),
}

#: Parts of the rates that kernels reach: matrix products of the sizes of training; attention by its kernels
#: (FlashAttention 3 reports 740 TFLOP/s of 989 in forward and less in backward; FlashAttention 2 about half of that on
#: the same device); copies and pointwise operators; links in large collectives.
MATMUL_EFFICIENCY = 0.7
ATTENTION_EFFICIENCY: Mapping[str, float] = {"flash2": 0.35, "flash3": 0.6, "none": 0.35}
MEMORY_EFFICIENCY = 0.8
LINK_EFFICIENCY = 0.8
