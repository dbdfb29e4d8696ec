"""The time of a step from its operations, bytes and the hardware's rates: a lower bound and an expected time.

The lower bound has every operation at the published rate, attention's masked half left out, and everything overlapped:
the largest of computing, the memory's bytes and each axis's traffic.  The expected time has the fractions of the rates
that kernels reach, adds sequential parts (products, attention, the memory's bytes, and the traffic of all axes
but FSDP2's), and hides FSDP2's traffic behind them as far as it is shorter.  Neither knows launches, stragglers,
input or the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_runtime.dry_run.types import Estimate, bytes_sent_by_axis
from fsdp_runtime.errors import EstimateError
from fsdp_runtime.values import PEAK_FLOPS


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of one accelerator."""

    flops: float  # operations per second of dense matrix products in bfloat16
    float8_flops: float | None = None  # likewise in float8; ``None`` without such units
    memory_bandwidth: float  # bytes per second of its memory
    node_bandwidth: float  # bytes per second that a rank sends inside a node
    network_bandwidth: float = 50e9  # bytes per second that a rank sends to other nodes
    node: int = 8  # ranks of a node


#: Dense rates and bytes per second of the memory as in the vendors' data sheets; links are one direction of NVLink, and
#: 400 Gb/s a rank between nodes.
HARDWARE: Mapping[str, Hardware] = {
    "A100": Hardware(flops=PEAK_FLOPS["A100"], memory_bandwidth=2.04e12, node_bandwidth=300e9, network_bandwidth=25e9),
    "H100": Hardware(flops=PEAK_FLOPS["H100"], float8_flops=1979e12, memory_bandwidth=3.35e12, node_bandwidth=450e9),
    "H200": Hardware(flops=PEAK_FLOPS["H200"], float8_flops=1979e12, memory_bandwidth=4.8e12, node_bandwidth=450e9),
    "B200": Hardware(flops=PEAK_FLOPS["B200"], float8_flops=4500e12, memory_bandwidth=8e12, node_bandwidth=900e9),
}

#: Parts of the rates that kernels reach: matrix products of the sizes of training; attention by its kernels
#: (FlashAttention 3 reports 740 TFLOP/s of 989 in forward and less in backward; FlashAttention 2 about half of that on
#: the same device); copies and pointwise operators; links in large collectives.
MATMUL_EFFICIENCY = 0.7
ATTENTION_EFFICIENCY: Mapping[str, float] = {"flash2": 0.35, "flash3": 0.6, "none": 0.35}
MEMORY_EFFICIENCY = 0.8
LINK_EFFICIENCY = 0.8


#: Axes with traffic that FSDP2 overlaps with computing.
_OVERLAPPED = ("dp_shard", "dp_shard_cp", "dp_replicate", "efsdp", "world")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step."""

    lower_bound: float  # everything at published rates and overlapped
    expected: float  # with the assumed fractions of the rates
    matmul: float  # matrix products, at the assumed fraction
    attention: float  # attention without its masked half, likewise
    memory: float  # bytes that other operators read and write, likewise
    traffic: Mapping[str, float]  # bytes sent by axis, likewise
    tokens_per_second: float  # tokens of this rank's share of the batch by the expected time


def step_time(estimate: Estimate, hardware: str | Hardware) -> StepTime:
    """Return the time of an estimate's step on hardware given by name or rates, all its micro-batches included."""
    if isinstance(hardware, str):
        if hardware not in HARDWARE:
            raise EstimateError(
                f"hardware {hardware!r}: write one of {', '.join(HARDWARE)}, or give Hardware(flops=...)"
            )
        hardware = HARDWARE[hardware]
    settings, kinds = estimate.settings, estimate.flops_by_kind
    attention, float8 = kinds.get("attention", 0) / 2, kinds.get("float8", 0)  # without the half that is masked
    products = sum(kinds.values()) - kinds.get("attention", 0) - float8
    if float8 and hardware.float8_flops is None:
        raise EstimateError(f"{hardware} has no rate of float8 products: give Hardware(float8_flops=...), or no Float8")
    matmul = products / hardware.flops + float8 / (hardware.float8_flops or hardware.flops)
    sent = {axis: nbytes for axis, nbytes in bytes_sent_by_axis(estimate.traffic).items() if nbytes}
    links = {axis: nbytes / _bandwidth(estimate, axis, hardware) for axis, nbytes in sent.items()}
    moved = 0.0 if settings.compiled else estimate.bytes_moved / hardware.memory_bandwidth
    passes = settings.micro_batches
    lower = max(matmul + attention / hardware.flops, *links.values(), 0.0)
    parts = (
        matmul / MATMUL_EFFICIENCY,
        attention / hardware.flops / ATTENTION_EFFICIENCY[settings.attention_kernels],
        moved / MEMORY_EFFICIENCY,
    )
    links = {axis: seconds / LINK_EFFICIENCY for axis, seconds in links.items()}
    hidden = sum(seconds for axis, seconds in links.items() if axis in _OVERLAPPED)
    serial = sum(parts) + sum(links.values()) - hidden
    expected = max(serial, hidden) * passes
    ranks = settings.world_size // (settings.mesh.get("dp_replicate", 1) * settings.mesh.get("dp_shard", 1))
    tokens = settings.seq_len * settings.micro_batch * passes / ranks
    return StepTime(
        lower_bound=lower * passes,
        expected=expected,
        matmul=parts[0] * passes,
        attention=parts[1] * passes,
        memory=parts[2] * passes,
        traffic={axis: seconds * passes for axis, seconds in links.items()},
        tokens_per_second=tokens / expected if expected else 0.0,
    )


def _bandwidth(estimate: Estimate, axis: str, hardware: Hardware) -> float:
    """Return the rate of an axis: a node's rate if the axis and its inner axes fit into one node."""
    # A ring over several nodes crosses the network with one of the node's ranks per ring; the ranks of a
    # node share the traffic, so that each sends at the network's rate times the ranks of the axis in a node.
    mesh = estimate.settings.mesh
    inner = 1
    for name in reversed([name for name in mesh if name != "ep"]):
        if name == axis or axis not in mesh:
            break
        inner *= mesh[name]
    ranks = max((item.ranks for item in estimate.traffic if item.axis == axis), default=1)
    if ranks * inner <= hardware.node:
        return hardware.node_bandwidth
    together = max(1, hardware.node // inner)
    return min(hardware.node_bandwidth, hardware.network_bandwidth * together)
