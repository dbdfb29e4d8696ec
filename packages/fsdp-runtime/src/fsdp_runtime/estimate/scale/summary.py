"""A recording, summed up by what grows with the number of blocks: regions of the step, counts, bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_runtime.estimate.trace.recorder import Moment, Recording, Stored
from fsdp_runtime.estimate.types import Bytes, Phase

#: By phase, kind of collective and ranks.
CallKey = tuple[Phase, str, tuple[int, ...]]


class Region(NamedTuple):
    """A part of a step in which as many blocks have run at every moment.

    Args:
        phase: the phase.
        block: the place of the last block that was entered, -1 before the first.
        inside: whether that block still runs; else what comes after it.
        step: of phases without blocks, the number of the operator; else 0.
    """

    phase: Phase
    block: int
    inside: bool
    step: int = 0


class High(NamedTuple):
    """The highest moment of a region."""

    nbytes: Bytes
    moment: Moment


@dataclass(frozen=True)
class Summary:
    """One trace.

    Args:
        blocks: how many blocks of the decoder ran.
        regions: the highest moments.
        before: alive before the step.
        ends: alive at the end of each phase.
        calls: collectives.
        nbytes: what this rank puts into them.
        flops: floating-point operations.
        whole: by pattern of names, how many parameters every rank holds whole, and their bytes.
        assumed: results that depend on data; blocks as ``*``.
        idle: patterns of trainable parameters that got no gradient.
    """

    blocks: int
    regions: dict[Region, High]
    before: Bytes
    ends: dict[Phase, Bytes]
    calls: Counter[CallKey]
    nbytes: Counter[CallKey]
    flops: int
    whole: dict[str, tuple[int, int]] = field(default_factory=dict)
    assumed: tuple[tuple[str, str, str], ...] = ()
    idle: frozenset[str] = frozenset()


def summarize(recording: Recording, blocks: Sequence[str], outside: set[int]) -> Summary:
    """Sum up a recording.

    Args:
        recording: what happened.
        blocks: the paths of the decoder's blocks.
        outside: widths of the vocabulary, whole and local: tensors outside blocks with such a last dim are logits.
    """
    categories = [_category(stored, recording.moments, blocks, outside) for stored in recording.stored]
    regions, before, ends = _highest(recording, categories, _regions(recording.moments, blocks))
    calls: Counter[CallKey] = Counter()
    nbytes: Counter[CallKey] = Counter()
    for phase, call in recording.collectives:
        calls[phase, call.kind, call.ranks] += 1
        nbytes[phase, call.kind, call.ranks] += call.nbytes
    return Summary(
        blocks=len(blocks),
        regions=regions,
        before=before,
        ends=ends,
        calls=calls,
        nbytes=nbytes,
        flops=recording.flops,
        assumed=tuple(dict.fromkeys((name, starred(path), told) for name, path, told in recording.assumed)),
    )


def starred(path: str) -> str:
    """A path with every number in it as ``*``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _category(stored: Stored, moments: Sequence[Moment], blocks: Sequence[str], vocabulary: set[int]) -> str:
    """What a storage is for, from what was said of it, else from its shape and from when it lived."""
    if stored.category is not None:
        return stored.category
    moment = moments[stored.born]
    if stored.last_dim in vocabulary and _block_of(moment.module, blocks) is None and moment.phase != "optimizer":
        return "logits"
    if moment.phase in ("forward", "loss") and stored.outlives_forward:
        return "activations"
    return "temporaries"


def _highest(
    recording: Recording, categories: Sequence[str], regions: Sequence[Region]
) -> tuple[dict[Region, High], Bytes, dict[Phase, Bytes]]:
    """Replay the changes."""
    live: Counter[str] = Counter()
    total = 0
    highest: dict[Region, tuple[int, dict[str, int], Moment]] = {}
    ending: dict[int, list[Phase]] = {}  # a phase that changes nothing ends where the one before it does
    for phase, position in recording.ends.items():
        ending.setdefault(position, []).append(phase)
    at_end: dict[Phase, Bytes] = {}
    before = Bytes()
    for position, change in enumerate(recording.changes):
        if change.moment >= 0 and before.total == 0:
            before = Bytes(**live)
        at_end |= {phase: Bytes(**live) for phase in ending.get(position, ())}
        live[categories[change.storage]] += change.delta
        total += change.delta
        if change.moment < 0 or change.delta < 0:
            continue
        region = regions[change.moment]
        if region not in highest or total > highest[region][0]:
            highest[region] = (total, dict(live), recording.moments[change.moment])
    at_end |= {phase: Bytes(**live) for phase in ending.get(len(recording.changes), ())}
    found = {region: High(Bytes(**parts), moment) for region, (_, parts, moment) in highest.items()}
    return found, before, at_end


def _regions(moments: Sequence[Moment], blocks: Sequence[str]) -> list[Region]:
    """The region of every moment."""
    found: list[Region] = []
    phase, last, step = None, -1, 0
    for moment in moments:
        assert moment.phase is not None  # noqa: S101  # moments are made in phases
        if moment.phase != phase:
            phase, last, step = moment.phase, -1, 0
        if moment.phase in ("clip", "optimizer"):
            found.append(Region(moment.phase, -1, False, step))
            step += 1
            continue
        block = _block_of(moment.module, blocks)
        last = last if block is None else block
        found.append(Region(moment.phase, last, block is not None))
    return found


def _block_of(module: str, blocks: Sequence[str]) -> int | None:
    return next((i for i, path in enumerate(blocks) if module == path or module.startswith(f"{path}.")), None)
