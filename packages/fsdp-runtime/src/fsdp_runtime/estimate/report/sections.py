"""What a report says, in sections of tables and lines that a terminal and a page both show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_runtime.estimate.candidates import Candidate, Sweep
from fsdp_runtime.estimate.report.format import readable_bytes, readable_count, readable_mesh, readable_seconds
from fsdp_runtime.estimate.scale.traffic_totals import by_axis, moved_bytes, unpriced_axes
from fsdp_runtime.estimate.types import Advice, Assumed, Estimate, Peak, Settings

#: Categories of memory as a reader calls them.
CATEGORY_NAMES = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "buffers": "buffers",
    "gathered": "gathered parameters",
    "activations": "activations",
    "logits": "logits",
    "inputs": "inputs",
    "temporaries": "temporaries",
}

_NONE = "-"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with a table, lines, or both below it.

    Args:
        heading: what it is about.
        rows: a table, its header first.
        left: how many of its columns are words; the others are numbers.
        lines: sentences below.
        tone: ``"good"`` or ``"bad"`` where the heading is a verdict.
    """

    heading: str
    rows: Sequence[Sequence[str]] = ()
    left: int = 1
    lines: Sequence[str] = ()
    tone: str = ""


def estimate_sections(estimate: Estimate) -> list[Section]:
    """One estimate: what was estimated, memory, traffic, work, what is whole, findings, and whether it fits."""
    found = [
        settings_section(estimate.settings),
        verdict_section(estimate),
        memory_section(estimate),
        traffic_section(estimate),
        Section(heading=f"Work: {readable_count(estimate.flops, 'FLOP')} a step of this rank, recomputation included"),
        Section(
            heading=f"Whole on every rank: {readable_bytes(sum(item.nbytes for item in estimate.whole))}",
            lines=[f"{item.pattern} ({item.count}, {readable_bytes(item.nbytes)})" for item in estimate.whole],
        ),
        Section(heading="Findings of the plan checker", lines=estimate.findings or ("none",)),
    ]
    if estimate.assumed:
        found.append(Section(heading="Assumed, since it depends on data", lines=[*map(assumed_line, estimate.assumed)]))
    return found


def sweep_sections(sweep: Sweep, *, shown: int | None = None) -> list[Section]:
    """The ranking, at most so many of it, and what was refused and why."""
    estimated = sweep.estimated
    refused = [candidate for candidate in sweep.candidates if candidate.estimate is None]
    more = len(estimated) - shown if shown is not None else 0
    found = [
        Section(
            heading=f"{len(estimated)} ways to train on {sweep.world_size:,} ranks, by: {sweep.ranked_by}",
            rows=_ranking(estimated[:shown]) if estimated else (),
            left=5,
            lines=[*([f"and {more} more"] if more > 0 else []), *_unpriced(estimated)],
        )
    ]
    if refused:
        found.append(Section(heading=f"Refused: {len(refused)}", lines=_reasons(refused)))
    if sweep.best is None and estimated:
        found.append(Section(heading="Nothing fits", tone="bad"))
    return found


def settings_section(settings: Settings) -> Section:
    """What was estimated, and how."""
    options = [
        f"{settings.micro_batch} x {settings.seq_len:,} tokens",
        settings.dtype + (f" (kept in {settings.master_dtype})" if settings.master_dtype else ""),
        f"optimizer {settings.optimizer}",
        f"loss: {settings.logprobs}",
        f"plan: {settings.plan}",
        *(["sequence-parallel"] if settings.sequence_parallel else []),
        f"recomputing: {settings.activation_checkpointing}",
        *(["offloaded"] if settings.offload else []),
    ]
    size = f"{settings.model}, {readable_count(settings.parameters)} parameters"
    where = f"{settings.world_size:,} ranks ({readable_mesh(settings.mesh)})"
    return Section(heading=f"{size}, rank {settings.rank} of {where}", lines=[", ".join(options), settings.scaling])


def verdict_section(estimate: Estimate) -> Section:
    """Whether the peak fits the device, and what would lower it."""
    peak, device = estimate.memory.peak.total, estimate.device_memory
    advice = [advice_line(item) for item in estimate.advice]
    if device is None:
        return Section(heading=f"Peak: {readable_bytes(peak)}", lines=advice)
    told = f"{readable_bytes(peak)} of {readable_bytes(device)}"
    if estimate.fits:
        return Section(heading=f"Fits: {told}, {readable_bytes(device - peak)} to spare", lines=advice, tone="good")
    missing = f"{readable_bytes(peak - device)} too much; what would lower the peak:" if advice else "too much"
    return Section(heading=f"Does not fit: {told}, {missing}", lines=advice, tone="bad")


def memory_section(estimate: Estimate) -> Section:
    """Bytes by category at the moments that matter, and when the peak occurs."""
    memory = estimate.memory
    moments = {
        "between steps": memory.held,
        "after forward": memory.after_forward,
        "after backward": memory.after_backward,
        "at the peak": memory.peak.nbytes,
        **({"on the host": memory.host} if memory.host.total else {}),
    }
    rows = [["", *moments]]
    for category, name in CATEGORY_NAMES.items():
        sizes = [moment.by_category()[category] for moment in moments.values()]
        if any(sizes):
            rows.append([name, *(readable_bytes(size) if size else _NONE for size in sizes)])
    rows.append(["all", *(readable_bytes(moment.total) for moment in moments.values())])
    phases = ", ".join(f"{peak.phase} {readable_bytes(peak.total)}" for peak in memory.phases)
    lines = [f"peak: {peak_line(memory.peak)}", f"highest moment of each phase: {phases}"]
    return Section(heading="Memory of this rank", rows=rows, lines=lines)


def traffic_section(estimate: Estimate) -> Section:
    """Collectives of a step by axis and kind."""
    if not estimate.traffic:
        return Section(heading="Traffic of a step: none")
    rows = [["axis", "collective", "ranks", "calls", "put in", "leaves the rank", "at least"]]
    for total in by_axis(estimate.traffic):
        sizes = [f"{total.ranks:,}", f"{total.count:,}", readable_bytes(total.nbytes), readable_bytes(total.moved)]
        rows.append([total.axis, total.kind, *sizes, _duration(total.seconds)])
    moved = readable_bytes(moved_bytes(estimate.traffic))
    rows.append(["all", "", "", "", "", moved, _duration(estimate.communication_seconds)])
    return Section(heading="Traffic of a step", rows=rows, left=2)


def advice_line(advice: Advice) -> str:
    """A change, and what it saves where that can be told."""
    return advice.change if advice.saves is None else f"{advice.change}: up to {readable_bytes(advice.saves)} less"


def peak_line(peak: Peak) -> str:
    """When a peak occurs: phase, module and operator."""
    where = f", in {peak.module}" if peak.module else ""
    return f"{peak.phase}{where} ({peak.operator})"


def assumed_line(item: Assumed) -> str:
    """An operator whose result depends on data, and what was taken for it."""
    missing = "" if item.counted else "; NOT in the numbers"
    return f"{item.operator} in {item.module or 'the model'}: {item.assumption}{missing}"


def _ranking(found: Sequence[Candidate]) -> list[list[str]]:
    rows = [["", "mesh", "SP", "recomputes", "fits", "peak", "sent / 1M tokens", "time / 1M tokens", "FLOP / token"]]
    for place, candidate in enumerate(found, start=1):
        estimate = candidate.estimate
        if estimate is None:
            continue
        fits = {None: _NONE, True: "yes", False: "no"}[estimate.fits]
        words = [readable_mesh(candidate.mesh.sizes), "yes" if candidate.sequence_parallel else "no"]
        rows.append(
            [
                *(str(place), *words, candidate.activation_checkpointing, fits),
                readable_bytes(estimate.memory.peak.total),
                readable_bytes(candidate.moved),
                _duration(candidate.seconds),
                readable_count(estimate.flops * candidate.world_size / candidate.tokens),
            ]
        )
    return rows


def _reasons(refused: Sequence[Candidate]) -> list[str]:
    """Each reason once, with the ways to train that it stops; a mesh stands for all ways that share its reason."""
    meshes = Counter((candidate.refusal, readable_mesh(candidate.mesh.sizes)) for candidate in refused)
    return [f"{mesh} ({count} of its ways): {reason}" for (reason, mesh), count in meshes.items()]


def _unpriced(found: Iterable[Candidate]) -> list[str]:
    """A warning where some axes have a bandwidth and others not."""
    estimates = [candidate.estimate for candidate in found if candidate.estimate is not None]
    if not any(estimate.communication_seconds for estimate in estimates):
        return []
    axes = dict.fromkeys(axis for estimate in estimates for axis in unpriced_axes(estimate.traffic))
    return [f"no bandwidth was given for {', '.join(axes)}: the time leaves it out"] if axes else []


def _duration(seconds: float | None) -> str:
    return _NONE if seconds is None else readable_seconds(seconds)
