"""The content of a report as sections of tables and lines, for terminals and pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fsdp_runtime.dry_run.report.format import format_bytes, format_count, format_seconds
from fsdp_runtime.dry_run.sweep_types import Candidate, Sweep, format_mesh
from fsdp_runtime.dry_run.types import (
    Assumption,
    Estimate,
    Memory,
    MemoryBreakdown,
    Settings,
    axes_without_bandwidth,
    total_bytes_sent,
    totals_by_axis,
)
from tp_plans.runtime import colorize

#: Labels of the categories of memory.
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
    "workspaces": "workspaces of cuBLAS",
}

_NONE = "-"
#: Meters count neither (``ModelFlops``).
_WORK = "with recomputation and the masked half of causal attention"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with a table, lines, or both below it."""

    heading: str
    rows: Sequence[Sequence[str]] = ()  # a table, its header first
    left: int = 1  # number of leading columns that are left-aligned; the others hold numbers
    lines: Sequence[str] = ()  # sentences below the table
    status: str = ""  # ``"good"`` or ``"bad"`` if the heading is a verdict
    code: bool = False  # whether the lines are code


def estimate_sections(estimate: Estimate) -> list[Section]:
    """Return the sections of an estimate: settings, verdict, memory, traffic, work, replicated parameters, findings."""
    assumptions = [*map(assumption_line, estimate.assumptions)]
    return [
        settings_section(estimate.settings),
        verdict_section(estimate),
        memory_section(estimate),
        traffic_section(estimate),
        *([pipeline_section(estimate)] if estimate.pipeline else []),
        Section(heading=f"Work: {format_count(estimate.flops, 'FLOP')} per step on this rank, {_WORK}"),
        Section(
            heading="Replicated on every rank (all axes): "
            + format_bytes(sum(item.nbytes for item in estimate.replicated)),
            lines=[f"{item.pattern} ({item.count}, {format_bytes(item.nbytes)})" for item in estimate.replicated],
        ),
        Section(heading="Findings of the plan check", lines=estimate.findings or ("none",)),
        *([Section(heading="Assumptions", lines=assumptions)] if assumptions else []),
    ]


def sweep_sections(sweep: Sweep, *, shown: int | None = None) -> list[Section]:
    """Return the ranking, at most ``shown`` candidates of it, and the failed candidates with their errors."""
    estimated = sweep.estimated
    failed = [candidate for candidate in sweep.candidates if candidate.estimate is None]
    more = len(estimated) - shown if shown is not None else 0
    sections = [
        Section(
            heading=f"{len(estimated)} candidates on {sweep.world_size:,} ranks, ranked by: {sweep.ranked_by}",
            rows=_ranking(estimated[:shown]) if estimated else (),
            left=5,
            lines=[
                *([f"and {more} more"] if more > 0 else []),
                *([f"FLOP / token: {_WORK}"] if estimated else []),
                *_bandwidth_warning(estimated),
            ],
        )
    ]
    if failed:
        sections.append(Section(heading=f"Not possible: {len(failed)}", lines=candidate_errors(failed)))
    if sweep.best is None and estimated:
        sections.append(Section(heading="Nothing fits", status="bad"))
    return sections


def settings_section(settings: Settings) -> Section:
    """Return the model, mesh and step that were estimated."""
    options = [
        f"{settings.micro_batch} x {settings.seq_len:,} tokens",
        settings.dtype + (f" (master dtype {settings.master_dtype})" if settings.master_dtype else ""),
        f"optimizer {settings.optimizer}",
        f"loss: {settings.logprobs}",
        f"plan: {settings.plan}",
        *(["sequence-parallel"] if settings.sequence_parallel else []),
        *([settings.context_parallel] if settings.context_parallel != "allgather" else []),
        f"activation checkpointing: {settings.activation_checkpointing}",
        *(["offloaded"] if settings.offload else []),
    ]
    size = f"{settings.model}, {format_count(settings.parameters)} parameters"
    where = f"{settings.world_size:,} ranks ({format_mesh(settings.mesh)})"
    return Section(heading=f"{size}, rank {settings.rank} of {where}", lines=[", ".join(options), settings.scaling])


def verdict_section(estimate: Estimate) -> Section:
    """Return the verdict on the device memory, and the changes that would lower the peak."""
    peak, device = estimate.memory.device, estimate.device_memory
    advice = [
        each.change if each.saves is None else f"{each.change}: up to {format_bytes(each.saves)} less"
        for each in estimate.advice
    ]
    if device is None:
        return Section(heading=f"Device memory: {format_bytes(peak)}", lines=advice)
    sizes = f"{format_bytes(peak)} of {format_bytes(device)}"
    if estimate.fits:
        return Section(heading=f"Fits: {sizes}, {format_bytes(device - peak)} to spare", lines=advice, status="good")
    excess = f"{format_bytes(peak - device)} too much; changes that would lower the peak:"
    return Section(heading=f"Does not fit: {sizes}, {excess}", lines=advice, status="bad")


def memory_section(estimate: Estimate) -> Section:
    """Return bytes by category at four points of the step, and the location of the peak."""
    memory = estimate.memory
    points = {**points_of(memory), "at the peak": memory.peak.nbytes}
    if memory.host.total:
        points["on the host"] = memory.host
    rows = [["", *points]]
    named = [sizes_by_name(point) for point in points.values()]
    for name in CATEGORY_NAMES.values():
        sizes = [each[name] for each in named]
        if any(sizes):
            rows.append([name, *(format_bytes(size) if size else _NONE for size in sizes)])
    rows.append(["all", *(format_bytes(point.total) for point in points.values())])
    phases = ", ".join(f"{peak.phase} {format_bytes(peak.total)}" for peak in memory.phases)
    where = f", in {memory.peak.module}" if memory.peak.module else ""
    peak = f"peak: {memory.peak.phase}{where} ({memory.peak.operator})"
    lines = [peak, f"peak of each phase: {phases}", *_device_lines(memory)]
    return Section(heading="Memory of this rank", rows=rows, lines=lines)


def points_of(memory: Memory) -> dict[str, MemoryBreakdown]:
    """Return live bytes at three points of a step, by the label of the point."""
    live = (memory.resident, memory.after_forward, memory.after_backward)
    return dict(zip(("between steps", "after forward", "after backward"), live, strict=True))


def sizes_by_name(nbytes: MemoryBreakdown) -> dict[str, int]:
    """Return bytes by the label of their category, in the order of reports."""
    return {name: getattr(nbytes, category) for category, name in CATEGORY_NAMES.items()}


def _device_lines(memory: Memory) -> list[str]:
    """Return lines with the allocator's reserved bytes and the further bytes of the process."""
    constants = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.constants.items())
    besides = f"; besides about {constants}: device memory {format_bytes(memory.device)}" if constants else ""
    if memory.reserved is None or memory.fragmentation is None:
        return [f"reserved by the allocator: unknown{besides}"]
    more = format_bytes(memory.fragmentation)
    return [f"reserved by the allocator: {format_bytes(memory.reserved)}, {more} more than live tensors{besides}"]


def traffic_section(estimate: Estimate) -> Section:
    """Return the collectives of a step by axis and kind."""
    if not estimate.traffic:
        return Section(heading="Traffic per step: none")
    rows = [["axis", "collective", "ranks", "calls", "input", "sent", "min. time"]]
    for total in totals_by_axis(estimate.traffic):
        sizes = [f"{total.ranks:,}", f"{total.count:,}", format_bytes(total.nbytes), format_bytes(total.bytes_sent)]
        rows.append([total.axis, total.kind, *sizes, _duration(total.seconds)])
    sent = format_bytes(total_bytes_sent(estimate.traffic))
    rows.append(["all", "", "", "", "", sent, _duration(estimate.communication_seconds)])
    return Section(heading="Traffic per step", rows=rows, left=2)


def pipeline_section(estimate: Estimate) -> Section:
    """Return the ranks of ``pp`` with their blocks, memory, work and sends."""
    rows = [["rank of pp", "blocks", "between steps", "peak", "in flight", "FLOP", "idle", "sent to"]]
    for rank in estimate.pipeline:
        blocks = ", ".join(f"{first} to {last}" for first, last in rank.blocks)
        sent = ", ".join(f"{other}: {format_bytes(size)}" for other, size in rank.bytes_sent.items())
        sizes = [format_bytes(rank.resident.total), format_bytes(rank.peak.total), str(rank.in_flight)]
        rows.append([str(rank.rank), blocks, *sizes, format_count(rank.flops, ""), f"{rank.idle:.1%}", sent])
    worst = max(estimate.pipeline, key=lambda rank: rank.peak.total).rank
    lines = [
        f"the highest peak is on rank {worst}: the other sections are of this rank",
        f"bubble: ranks wait {estimate.bubble:.1%} of the time, if times are in proportion to FLOP and sends take none",
    ]
    return Section(heading="Pipeline", rows=rows, left=2, lines=lines)


def assumption_line(item: Assumption) -> str:
    """Return a module, the assumption about it, and the operator with a data-dependent result."""
    operator = f" ({item.operator})" if item.operator else ""
    missing = "" if item.counted else "; NOT in the numbers"
    return f"{item.module or 'the model'}: {item.assumption}{operator}{missing}"


_PER_TOKEN = ["sent / 1M tokens", "time / 1M tokens", "FLOP / token"]
_RANKED = ["", "mesh", "SP", "checkpointing", "fits", "device memory", *_PER_TOKEN]


def _ranking(candidates: Sequence[Candidate]) -> list[list[str]]:
    rows = [_RANKED]
    for position, candidate in enumerate(candidates, start=1):
        estimate = candidate.estimate
        if estimate is None:
            continue
        fits = {None: _NONE, True: "yes", False: "no"}[estimate.fits]
        words = [_mesh_and_way(candidate), "yes" if candidate.sequence_parallel else "no"]
        rows.append(
            [
                *(str(position), *words, candidate.activation_checkpointing, fits),
                format_bytes(estimate.memory.device),
                format_bytes(candidate.bytes_sent),
                _duration(candidate.seconds),
                format_count(estimate.flops * candidate.world_size / candidate.tokens),
            ]
        )
    return rows


def _mesh_and_way(candidate: Candidate) -> str:
    way = candidate.context_parallel
    return format_mesh(candidate.axes) + (f", {way}" if way != "allgather" else "")


def candidate_errors(failed: Sequence[Candidate]) -> list[str]:
    """Return each error once, with its meshes and the number of candidates."""
    meshes: dict[str, list[str]] = {}
    for candidate in failed:
        meshes.setdefault(candidate.error, []).append(_mesh_and_way(candidate))
    return [
        f"{', '.join(dict.fromkeys(cases))} ({len(cases)} {'candidate' if len(cases) == 1 else 'candidates'}): {error}"
        for error, cases in meshes.items()
    ]


def _bandwidth_warning(candidates: Iterable[Candidate]) -> list[str]:
    """Return a warning if some axes have a bandwidth and others do not."""
    estimates = [candidate.estimate for candidate in candidates if candidate.estimate is not None]
    if not any(estimate.communication_seconds for estimate in estimates):
        return []
    axes = dict.fromkeys(axis for estimate in estimates for axis in axes_without_bandwidth(estimate.traffic))
    return [f"no bandwidth was given for {', '.join(axes)}: the times do not include it"] if axes else []


def _duration(seconds: float | None) -> str:
    return _NONE if seconds is None else format_seconds(seconds)


#: Keys of the terminal colours by the status of a section.
_COLOURS = {"good": "+", "bad": "error", "": "head"}


def text_lines(sections: Iterable[Section]) -> Iterator[str]:
    """Yield the lines of a report, an empty line between sections; with colours on a terminal that supports them."""
    for index, section in enumerate(sections):
        if index:
            yield ""
        if section.rows:
            header, *lines = aligned(section.rows, left=section.left)
            yield colorize("head", section.heading)
            yield f"  {colorize('head', header)}"
            yield from (f"  {line}" for line in lines)
        else:
            yield colorize(_COLOURS[section.status], section.heading)
        yield from (f"  {line}" for line in section.lines)


def aligned(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return the lines of a table; the first ``left`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown_lines(sections: Iterable[Section]) -> Iterator[str]:
    """Yield sections as Markdown: headings, tables, lists, code."""
    for section in sections:
        yield from (f"## {section.heading}", "")
        if section.rows:
            yield from (*markdown_table(section.rows, left=section.left), "")
        if section.code:
            yield from ("```python", *section.lines, "```", "")
        elif section.lines:
            yield from (*(f"- {line}" for line in section.lines), "")


def markdown_table(rows: Sequence[Sequence[str]], *, left: int) -> Iterator[str]:
    """Yield the lines of a table, its header first; columns from ``left`` on are right-aligned."""
    rules = ["---" if column < left else "---:" for column in range(len(rows[0]))]
    for row in (rows[0], rules, *rows[1:]):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |"
