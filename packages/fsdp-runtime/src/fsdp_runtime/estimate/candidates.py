"""Ways to train a model on so many ranks: which there are, and how they are ranked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fsdp_runtime.errors import EstimateError
from fsdp_runtime.estimate.report.format import readable_mesh
from fsdp_runtime.estimate.scale.traffic_totals import moved_bytes, unpriced_axes
from fsdp_runtime.estimate.types import Estimate
from fsdp_runtime.mesh.spec import MeshSpec


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train, and what the dry run said of it.

    Args:
        mesh: the mesh.
        sequence_parallel: whether the residual stream is cut over ``tp``.
        activation_checkpointing: the mode.
        estimate: what a rank holds and sends, or ``None`` where the way is refused.
        refusal: why it is refused, else ``""``.
        tokens: tokens of a step, over all ranks.
        seconds: floor of the time that traffic takes at the given bandwidths, plus, where the speed of the device was
            given, the operations at that speed; per million tokens.  ``None`` where neither was given.
        moved: bytes that leave a rank per million tokens.
    """

    mesh: MeshSpec
    sequence_parallel: bool
    activation_checkpointing: str
    estimate: Estimate | None = None
    refusal: str = ""
    tokens: int = 0
    seconds: float | None = None
    moved: float = 0.0

    @property
    def world_size(self) -> int:
        """The ranks of the mesh."""
        return math.prod(self.mesh.sizes.values())

    @property
    def label(self) -> str:
        """The mesh and what is switched on, as ``"dp_shard=32 tp=8, SP, block"``."""
        sequence_parallel = ["SP"] if self.sequence_parallel else []
        recomputing = [self.activation_checkpointing] if self.activation_checkpointing != "none" else []
        return ", ".join([readable_mesh(self.mesh.sizes), *sequence_parallel, *recomputing])

    def with_estimate(self, estimate: Estimate, *, device_flops: float | None) -> Candidate:
        """This candidate with what the dry run found, and what it comes to per million tokens."""
        settings, traffic = estimate.settings, estimate.traffic
        tokens = settings.seq_len * settings.micro_batch * self.mesh.dp_replicate * self.mesh.dp_shard
        working = estimate.flops / device_flops if device_flops else None
        known = [part for part in (estimate.communication_seconds, working) if part is not None]
        return replace(
            self,
            estimate=estimate,
            tokens=tokens,
            seconds=sum(known) * 1e6 / tokens if known else None,
            moved=moved_bytes(traffic) * 1e6 / tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All candidates, best first, those that were refused last.

    Args:
        world_size: ranks.
        candidates: the ways to train that were compared.
        ranked_by: in words, what decided the order.
    """

    world_size: int
    candidates: tuple[Candidate, ...]
    ranked_by: str

    @property
    def estimated(self) -> tuple[Candidate, ...]:
        """Those that were not refused, best first."""
        return tuple(candidate for candidate in self.candidates if candidate.estimate is not None)

    @property
    def best(self) -> Candidate | None:
        """The first one, unless nothing fits."""
        return next((each for each in self.estimated if each.estimate and each.estimate.fits is not False), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings."""
        return {
            "format": 1,
            "world_size": self.world_size,
            "ranked_by": self.ranked_by,
            "candidates": [_as_data(candidate) for candidate in self.candidates],
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)


def meshes(
    world_size: int, *, max_tp: int = 8, cp: Sequence[int] = (1,), dp_replicate: Sequence[int] | None = None
) -> list[MeshSpec]:
    """The meshes of so many ranks.

    Args:
        world_size: ranks.
        max_tp: the ranks of a node, which ``tp`` stays within.
        cp: sizes of the context-parallel axis.
        dp_replicate: numbers of replicas; by default one, and as many as leave each replica one node (HSDP).

    Raises:
        EstimateError: a size is not positive.
    """
    for name, sizes in {"world_size": [world_size], "max_tp": [max_tp], "cp": cp, "dp_replicate": dp_replicate}.items():
        if wrong := [size for size in sizes or () if size < 1]:
            raise EstimateError(f"{name}={wrong[0]}: give a positive integer")
    found: list[MeshSpec] = []
    for tp, context in product(range(1, max_tp + 1), cp):
        if world_size % (tp * context):
            continue
        data = world_size // (tp * context)
        in_a_node = max(max_tp // (tp * context), 1)
        choices = dp_replicate or (1, *([data // in_a_node] if data % in_a_node == 0 else []))
        found += [
            MeshSpec(dp_replicate=replicas, dp_shard=data // replicas, cp=context, tp=tp)
            for replicas in dict.fromkeys(choices)
            if data % replicas == 0
        ]
    return found


def candidates(
    specs: Iterable[MeshSpec], *, sequence_parallel: Sequence[bool], activation_checkpointing: Sequence[str]
) -> list[Candidate]:
    """Every mesh with every option; sequence parallelism only where there is a ``tp`` to cut over."""
    return [
        Candidate(mesh=spec, sequence_parallel=cut, activation_checkpointing=mode)
        for spec, cut, mode in product(specs, dict.fromkeys(sequence_parallel), dict.fromkeys(activation_checkpointing))
        if spec.tp > 1 or not cut
    ]


def ranked(world_size: int, found: Iterable[Candidate]) -> Sweep:
    """Candidates in order: what fits, then the fastest, or without speeds what holds and then what sends least.

    Times are floors (nothing overlaps, nothing waits) per token, since meshes differ in how many tokens a step takes;
    they order candidates and do not forecast a step.  Axes without a bandwidth would count as free, so candidates that
    send over one come after those that do not.
    """
    everything = list(found)
    timed = any(candidate.seconds is not None for candidate in everything)

    def order(candidate: Candidate) -> tuple[float, ...]:
        estimate = candidate.estimate
        if estimate is None:
            return (2.0,)
        fits = 1.0 if estimate.fits is False else 0.0
        peak, work = float(estimate.memory.peak.total), estimate.flops / candidate.tokens
        if timed:
            unpriced = float(bool(unpriced_axes(estimate.traffic)))
            return fits, unpriced, candidate.seconds or 0.0, work, peak
        return fits, peak, candidate.moved, work

    by = "seconds per token (no overlap), then operations" if timed else "peak memory, then bytes sent per token"
    return Sweep(world_size=world_size, candidates=tuple(sorted(everything, key=order)), ranked_by=f"fits, then {by}")


def _as_data(candidate: Candidate) -> dict[str, Any]:
    estimate = candidate.estimate
    return {
        "mesh": candidate.mesh.sizes,
        "sequence_parallel": candidate.sequence_parallel,
        "activation_checkpointing": candidate.activation_checkpointing,
        "refusal": candidate.refusal,
        "tokens": candidate.tokens,
        "seconds_per_million_tokens": candidate.seconds,
        "moved_per_million_tokens": candidate.moved,
        "estimate": None if estimate is None else estimate.to_dict(),
    }
