"""Summarize the traffic of a traced step by axis."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.dry_run.types import PHASES, Phase, Traffic
from fsdp_runtime.mesh.collectives import axis_names


def summarize_traffic(
    totals: Mapping[tuple[Phase, str, tuple[int, ...]], tuple[int, ...]],
    mesh: DeviceMesh,
    bandwidths: Mapping[str, float],
) -> tuple[Traffic, ...]:
    """Return counts and bytes by axis, phase and kind, in that order; a bandwidth under ``""`` is for other axes."""
    axes = axis_names(mesh)
    found = []
    for (phase, kind, ranks), (count, nbytes, sent) in totals.items():
        axis = axes.get(ranks, "ranks " + ",".join(map(str, ranks[:4])) + (",…" if len(ranks) > 4 else ""))
        speed = bandwidths.get(axis, bandwidths.get(""))
        found.append(
            Traffic(
                axis=axis,
                ranks=len(ranks),
                phase=phase,
                kind=kind,
                count=count,
                nbytes=nbytes,
                bytes_sent=sent,
                seconds=None if speed is None else sent / speed,
            )
        )
    order = list(dict.fromkeys(axes.values()))
    position = {axis: index for index, axis in enumerate(order)}
    return tuple(sorted(found, key=lambda t: (position.get(t.axis, len(order)), t.axis, PHASES.index(t.phase), t.kind)))
