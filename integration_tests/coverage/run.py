"""Run every architecture with tensor and with sequence parallelism, and record which are right.

A failure, crash or hang costs its own row only.  Every row is on disk as soon as it is known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from coverage import context_parallel, page
from coverage.bfloat16 import bfloat16_outcome
from coverage.bfloat16_tensor import MODE_NAMES, bfloat16_tensor_outcomes
from coverage.compiled import ALONE, BACKENDS, LENGTHS, WAYS, compile_is_due, compiled_outcome
from coverage.expert_page import PREFIXES, mesh_mode
from coverage.expert_parallel import MESHES, mixtures
from coverage.measure import KINDS, warm_up
from coverage.outcome import Outcome, evaluate, evaluate_experts, failure
from coverage.packing import POOLED, packed_outcome
from coverage.sections import SECTION_PARTS, Choice
from coverage.stages_page import MODES as STAGES
from coverage.stages_page import stages_outcome
from coverage.table import UNBUILDABLE, Entry, coverage_entries
from coverage.widths import WIDTH_KINDS, WIDTHS, is_due
from harness.ranks import RankPool, RanksFailed

RESULTS = Path("docs/coverage.json")
#: Ranks of the meshes that mixtures are measured on.
EXPERT_RANKS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, report, and write the results of a whole run; 1 where something has got worse."""
    options = _options(arguments)
    if options.pages:
        page.write_pages(options.results, page.read(options.results), coverage_entries())
        return 0
    chosen = _chosen(options.patterns)
    checked_in = page.read(options.results)
    working = options.working or options.results.with_suffix(f".tp{options.tp}.part.json")
    rows = page.read(working)["rows"] if options.resume else {}

    for part in options.measure:
        if part in PARTS:
            PARTS[part](options, chosen, rows, working)
        else:
            _measure_section(options, part)

    worse = page.regressions(checked_in["rows"], rows) if options.tp == checked_in.get("tp") else []
    for row in worse:
        _say(f"no longer right: {row}")
    if len(chosen) == len(_chosen(["*"])) and (options.accept or not worse) and not options.dry:
        _record(options, page.read(options.results), rows)
    return int(bool(worse) and not options.accept)


def _measure_tensor_parallelism(
    options: argparse.Namespace, chosen: dict[str, Entry], rows: dict[str, Any], working: Path
) -> None:
    """Measure the chosen rows with tensor and sequence parallelism, and packed rows."""
    modes = ["TP", "SP", *(["transformers"] if options.peers else [])]
    pool, alone = RankPool(options.tp), RankPool(1)
    try:
        pool.run(warm_up, timeout=600)
        for done, name in enumerate(chosen, 1):
            for mode in modes:
                if mode not in rows.setdefault(name, {}):
                    found = evaluate(pool, name, mode, kinds=KINDS, timeout=options.timeout)
                    rows[name][mode] = page.kept(found)
                    _say(f"[{done}/{len(chosen)}] {_line(name, mode, found)}")
            if "packed" not in rows[name] and name not in POOLED:
                rows[name]["packed"] = _packed(alone, name, options.timeout)
                _say(f"[{done}/{len(chosen)}] {name}, packed: {rows[name]['packed']['status']}")
            page.write(working, {"rows": rows})
    finally:
        pool.close()
        alone.close()


@contextmanager
def _ranks(count: int) -> Iterator[RankPool]:
    """Start ranks that have imported what every row needs."""
    pool = RankPool(count)
    try:
        pool.run(warm_up, timeout=600)
        yield pool
    finally:
        pool.close()


def _packed(pool: RankPool, name: str, timeout: float) -> dict[str, Any]:
    try:
        (found,) = pool.run(packed_outcome, name, timeout=timeout)
    except RanksFailed as failed:
        return page.kept(failure(failed, 0.0))
    return dict(found)


def _measure_experts(
    options: argparse.Namespace, chosen: dict[str, Entry], rows: dict[str, Any], working: Path
) -> None:
    """Measure the chosen mixtures under expert parallelism, on four ranks."""
    names = [name for name in mixtures() if name in chosen]
    cases = [(way, axes) for way in PREFIXES if way == "parallelize" or options.peers for axes in MESHES]
    with _ranks(EXPERT_RANKS) as pool:
        for done, name in enumerate(names, 1):
            row = rows.setdefault(name, {})
            for way, axes in cases:
                mode = mesh_mode(axes, way)
                again = way.removesuffix(" in float32")
                if mode not in row and (again == way or row[mesh_mode(axes, again)]["status"] == "wrong"):
                    found = evaluate_experts(pool, name, axes, way=way, timeout=options.timeout)
                    row[mode] = page.kept(found)
                    _say(f"[{done}/{len(names)}] {_line(name, mode, found)}")
            page.write(working, {"rows": rows})


def _measure_context(
    options: argparse.Namespace, chosen: dict[str, Entry], rows: dict[str, Any], working: Path
) -> None:
    """Measure the chosen rows under context parallelism, on two ranks."""
    chosen = {name: entry for name, entry in chosen.items() if name not in POOLED}
    _measure_modes(
        options, chosen, rows, working, modes=context_parallel.MODES, outcomes=context_parallel.context_outcomes
    )


def _measure_bfloat16(
    options: argparse.Namespace, chosen: dict[str, Entry], rows: dict[str, Any], working: Path
) -> None:
    """Measure the chosen rows in bfloat16 under FSDP2, on two ranks."""
    with _ranks(2) as pool:
        for done, name in enumerate(chosen, 1):
            if "bfloat16" not in rows.setdefault(name, {}):
                found = bfloat16_outcome(pool, name, timeout=options.timeout)
                rows[name]["bfloat16"] = page.kept(found)
                page.write(working, {"rows": rows})
                _say(f"[{done}/{len(chosen)}] {_line(name, 'bfloat16', found)}")


def _measure_widths(options: argparse.Namespace, chosen: dict[str, Entry], rows: dict[str, Any], working: Path) -> None:
    """Measure the chosen rows on four and eight ranks of ``tp``, and with FSDP2 on four."""
    modes = {name: width for name, width in WIDTHS.items() if width.mode != "transformers" or options.peers}
    for ranks in sorted({width.ranks for width in modes.values()} & {*options.ranks}):
        with _ranks(ranks) as pool:
            for done, name in enumerate(chosen, 1):
                row = rows.setdefault(name, {})
                for mode, width in modes.items():
                    if width.ranks == ranks and is_due(row, mode):
                        found = evaluate(
                            pool,
                            name,
                            width.mode,
                            kinds=WIDTH_KINDS,
                            timeout=options.timeout,
                            dp_shard=width.dp_shard,
                        )
                        row[mode] = page.kept(found)
                        _say(f"[{done}/{len(chosen)}] {_line(name, mode, found)}")
                page.write(working, {"rows": rows})


def _measure_bfloat16_tensor(
    options: argparse.Namespace, chosen: dict[str, Entry], rows: dict[str, Any], working: Path
) -> None:
    """Measure the chosen rows in bfloat16 with tensor and sequence parallelism, on two ranks."""
    modes = MODE_NAMES.values()
    _measure_modes(options, chosen, rows, working, modes=modes, outcomes=bfloat16_tensor_outcomes)


def _measure_modes(
    options: argparse.Namespace,
    chosen: dict[str, Entry],
    rows: dict[str, Any],
    working: Path,
    *,
    modes: Collection[str],
    outcomes: Callable[..., dict[str, dict[str, Any]]],
) -> None:
    """Measure the chosen rows on two ranks with a function that returns what is kept of all ``modes`` of a row."""
    with _ranks(2) as pool:
        for done, name in enumerate(chosen, 1):
            row = rows.setdefault(name, {})
            if {*modes} <= {*row}:
                continue
            row.update(outcomes(pool, name, timeout=options.timeout))
            page.write(working, {"rows": rows})
            for mode in modes:
                _say(f"[{done}/{len(chosen)}] {name}, {mode}: {_told(row[mode])}")


def _measure_compiled(
    options: argparse.Namespace, chosen: dict[str, Entry], rows: dict[str, Any], working: Path
) -> None:
    """Measure the chosen rows with compiled blocks under tensor and sequence parallelism, on two ranks."""
    with _ranks(2) as pool, _ranks(1) as alone:
        for done, name in enumerate(chosen, 1):
            row = rows.setdefault(name, {})
            for backend, way in product(options.backends, (*WAYS, ALONE)):
                mode = f"{backend} {way}"
                if not compile_is_due(row, mode, options.lengths):
                    continue
                row[mode] = compiled_outcome(
                    alone if way == ALONE else pool,
                    name,
                    way,
                    backend=backend,
                    lengths=options.lengths,
                    timeout=options.timeout,
                )
                page.write(working, {"rows": rows})
                _say(f"[{done}/{len(chosen)}] {name}, {mode}: {_told(row[mode])}")


def _measure_stages(options: argparse.Namespace, chosen: dict[str, Entry], rows: dict[str, Any], working: Path) -> None:
    """Measure the chosen rows in two and in four pipeline stages."""
    for mode, stages in STAGES.items():
        with _ranks(stages) as pool:
            for done, name in enumerate(chosen, 1):
                row = rows.setdefault(name, {})
                if mode not in row:
                    outcome = stages_outcome(pool, name, stages, timeout=options.timeout)
                    row |= {mode: outcome} if outcome else {}
                    page.write(working, {"rows": rows})
                    _say(f"[{done}/{len(chosen)}] {name}, {mode}: {_told(outcome)}")


def _measure_section(options: argparse.Namespace, part: str) -> None:
    """Measure one of the page's further sections on two ranks; with ``--dry``, only print what is found."""
    key, measure = SECTION_PARTS[part]
    results = page.read(options.results)
    section = results.setdefault(key, {})

    def keep(name: str, cells: dict[str, Any], column: str, found: Outcome) -> None:
        _say(_line(name, column, found))
        cells[column] = page.kept(found)
        if not options.dry:
            page.write(options.results, results)

    modes = ("TP", "SP", *(["transformers"] if options.peers else []))
    choice = Choice(options.patterns, modes, options.timeout, options.resume)
    with _ranks(2) as pool:
        measure(pool, section, keep, choice)


def _told(found: dict[str, Any]) -> str:
    return " ".join(f"{name} {value}" for name, value in found.items())[:300]


#: What can be measured, in this order.
PARTS = {
    "tensor": _measure_tensor_parallelism,
    "experts": _measure_experts,
    "context": _measure_context,
    "bfloat16": _measure_bfloat16,
    "bfloat16-tp": _measure_bfloat16_tensor,
    "widths": _measure_widths,
    "compiled": _measure_compiled,
    "stages": _measure_stages,
}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s coverage --", description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], help="rows, as 'qwen3*'; all by default")
    parser.add_argument("--tp", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--timeout", type=float, default=90, help="seconds for one architecture in one mode")
    parser.add_argument("--peers", action="store_true", help="also run transformers' own parallelism")
    parser.add_argument(
        "--measure",
        nargs="+",
        choices=[*PARTS, *SECTION_PARTS],
        default=["tensor"],
        help="tensor and sequence parallelism (default), mixtures over ep, the ways over cp, FSDP2 in bfloat16, "
        "tp in bfloat16, tp=4 and tp=8 and tp with FSDP2, compiled blocks, stages; heads and multimodal models by type",
    )
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[4, 8], help="numbers of ranks of the part 'widths' (default 4 8)"
    )
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS[:1], help="of the part 'compiled'")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=LENGTHS, help="tokens a row in the steps of the part 'compiled'"
    )
    parser.add_argument("--resume", action="store_true", help="go on where an earlier run was stopped")
    parser.add_argument("--accept", action="store_true", help="write the results even where some have got worse")
    parser.add_argument("--dry", action="store_true", help="leave the pages and the JSON as they are")
    parser.add_argument("--pages", action="store_true", help="measure nothing: write the pages from the JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    parser.add_argument("--working", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _chosen(patterns: Sequence[str]) -> dict[str, Entry]:
    return {
        name: entry
        for name, entry in coverage_entries().items()
        if name not in UNBUILDABLE and any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _record(options: argparse.Namespace, before: dict[str, Any], rows: dict[str, Any]) -> None:
    """Write the JSON and the pages; what was not run again (the peers, other sections' data) stays as it was."""
    kept = before["rows"] if not rows else {}
    merged = kept | {name: {**before["rows"].get(name, {}), **row} for name, row in rows.items()}
    versions = before.get("versions", {}) | dict.fromkeys(options.measure, page.versions())
    results = {**before, "tp": options.tp, "versions": versions, "rows": merged}
    page.write(options.results, results)
    page.write_pages(options.results, results, coverage_entries())


def _line(name: str, mode: str, found: Outcome) -> str:
    share = "" if found.share is None else f" {100 * found.share:.1f} % split"
    note = f" {' '.join(found.note.split())[:200]}" if found.note else ""
    return f"{name}, {mode}: {found.status}{share} ({found.seconds:.1f} s){note}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
