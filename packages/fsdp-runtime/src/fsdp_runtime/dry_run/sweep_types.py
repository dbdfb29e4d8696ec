"""Results of a sweep: candidates and their ranking."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_runtime.dry_run.step_time import step_time
from fsdp_runtime.dry_run.types import FORMAT, Estimate, total_bytes_sent
from fsdp_runtime.mesh import MeshSpec


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One mesh with options, and its dry run."""

    mesh: MeshSpec  # the mesh
    sequence_parallel: bool  # whether activations between blocks are sharded over ``tp``
    activation_checkpointing: str  # the mode
    context_parallel: str = "allgather"  # how attention spans the ranks of ``cp``
    estimate: Estimate | None = None  # the dry run, ``None`` if it failed
    error: str = ""  # why the dry run failed, else ``""``
    tokens: int = 0  # tokens of a step, over all ranks
    # lower bound of the traffic's time at the given bandwidths plus the time of the operations at the given speed of
    # the device, per million tokens, or the expected time on a given hardware; ``None`` without both
    seconds: float | None = None
    bytes_sent: float = 0.0  # bytes that a rank sends per million tokens

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.mesh.sizes.values())

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by axis name, in the mesh's order; last ``ep``, an axis that divides the same ranks again."""
        return {**self.mesh.sizes, "ep": self.mesh.ep}

    @property
    def label(self) -> str:
        """The mesh and the enabled options, such as ``"dp_shard=32 tp=8, SP, block"``."""
        options = ["SP"] if self.sequence_parallel else []
        options += [self.context_parallel] if self.context_parallel != "allgather" else []
        options += [self.activation_checkpointing] if self.activation_checkpointing != "none" else []
        return ", ".join([format_mesh(self.axes), *options])

    def with_estimate(
        self, estimate: Estimate, *, device_flops: float | None, hardware: str | None = None
    ) -> Candidate:
        """Return this candidate with its dry run and the numbers per million tokens."""
        settings = estimate.settings
        tokens = settings.seq_len * settings.micro_batch * self.mesh.dp_replicate * self.mesh.dp_shard
        expected = step_time(estimate, hardware).expected / settings.micro_batches if hardware is not None else None
        compute_seconds = estimate.flops / device_flops if device_flops else None
        known = [part for part in (estimate.communication_seconds, compute_seconds) if part is not None]
        return replace(
            self,
            estimate=estimate,
            tokens=tokens,
            seconds=expected * 1e6 / tokens if expected is not None else sum(known) * 1e6 / tokens if known else None,
            bytes_sent=total_bytes_sent(estimate.traffic) * 1e6 / tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and strings."""
        return {
            "mesh": self.axes,
            "sequence_parallel": self.sequence_parallel,
            "activation_checkpointing": self.activation_checkpointing,
            "context_parallel": self.context_parallel,
            "error": self.error,
            "tokens": self.tokens,
            "seconds_per_million_tokens": self.seconds,
            "bytes_sent_per_million_tokens": self.bytes_sent,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All candidates, best first, failed ones last."""

    world_size: int  # number of ranks
    candidates: tuple[Candidate, ...]  # the compared meshes with options
    ranked_by: str  # the criteria of the order, in words

    @property
    def estimated(self) -> tuple[Candidate, ...]:
        """Candidates with an estimate, best first."""
        return tuple(candidate for candidate in self.candidates if candidate.estimate is not None)

    @property
    def best(self) -> Candidate | None:
        """The best candidate, ``None`` if no candidate fits."""
        return next((each for each in self.estimated if each.estimate and each.estimate.fits is not False), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and strings."""
        return {
            "format": FORMAT,
            "world_size": self.world_size,
            "ranked_by": self.ranked_by,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Return the axes of a mesh that are larger than 1, such as ``"dp_shard=32 tp=8"``."""
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one rank"
