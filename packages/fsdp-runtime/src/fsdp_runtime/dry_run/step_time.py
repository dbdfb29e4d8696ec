"""The time of a step from its operations, bytes and the hardware's rates: a lower bound and an expected time.

The lower bound has every operation at the published rate, attention's masked half left out, and everything overlapped:
the largest of computing, the memory's bytes and each axis's traffic.  The expected time has the fractions of the rates
in ``hardware``, adds what follows one another (products, attention, the memory's bytes, and the traffic of all axes but
those of FSDP2), and hides FSDP2's traffic behind them as far as it is shorter.  Neither knows launches, stragglers,
input or the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_runtime.dry_run.hardware import (
    ATTENTION_EFFICIENCY,
    HARDWARE,
    LINK_EFFICIENCY,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Hardware,
)
from fsdp_runtime.dry_run.traffic_totals import bytes_sent_by_axis
from fsdp_runtime.dry_run.types import Estimate
from fsdp_runtime.errors import EstimateError

#: Axes whose traffic FSDP2 overlaps with computing.
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
    attention = kinds.get("attention", 0) / 2  # the masked half of a causal one
    matmul = sum(kinds.values()) - kinds.get("attention", 0)
    links = {axis: sent / _bandwidth(estimate, axis, hardware) for axis, sent in _sent(estimate).items()}
    moved = 0.0 if settings.compiled else estimate.bytes_moved / hardware.memory_bandwidth
    passes = settings.micro_batches
    lower = max((matmul + attention) / hardware.flops, *links.values(), 0.0)
    parts = (
        matmul / hardware.flops / MATMUL_EFFICIENCY,
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


def _sent(estimate: Estimate) -> dict[str, int]:
    return {axis: sent for axis, sent in bytes_sent_by_axis(estimate.traffic).items() if sent}


def _bandwidth(estimate: Estimate, axis: str, hardware: Hardware) -> float:
    """Return the rate of an axis: that of a node if the axis and those inside of it fit into one."""
    # A ring over several nodes crosses the network with one of the node's ranks for each of its own; the ranks of a
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
