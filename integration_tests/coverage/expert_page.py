"""The coverage page on expert parallelism: ours next to transformers' own, on the same meshes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from coverage.cells import Cell, table
from coverage.expert_parallel import MESHES

IN_FLOAT32 = "transformers in float32"
#: The name of what was run, by the way in which experts were divided over ``ep``.
PREFIXES = {
    "parallelize": "",
    "transformers": "transformers ",
    IN_FLOAT32: "transformers float32 ",
}
_MARKS = {"right": "✓", "refused": "refused", "failed": "✗ fails", "hung": "✗ hangs"}
#: Mismatches of parameters that are not experts' which a cell names.
_NAMED = 2
#: The longest outcome that stands in its cell; a longer one is a note.
_LONGEST = 60


def mesh_mode(axes: Mapping[str, int], way: str = "parallelize") -> str:
    """Return the name of what is measured on a mesh with ``ep``: ``"dp_shard=2 tp=2 ep=4"``."""
    return PREFIXES[way] + " ".join(f"{axis}={size}" for axis, size in axes.items())


_COLUMNS = ("parallelize", "transformers")
MODES = {way: [mesh_mode(axes, way) for axes in MESHES] for way in PREFIXES}


def summary(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for every way: the mixtures that are right on each mesh."""
    for way, title in (("parallelize", "expert parallelism"), ("transformers", "transformers' own expert parallelism")):
        counts = []
        for axes in MESHES:
            measured = [row for row in rows.values() if mesh_mode(axes, way) in row]
            if measured:
                right = sum(_is_right(row, axes, way) for row in measured)
                counts.append(f"{right} of {len(measured)} mixtures right on {mesh_mode(axes)}")
                again = [row for row in measured if mesh_mode(axes, IN_FLOAT32) in row] * (way == "transformers")
                if again:
                    single = sum(_is_right(row, axes, IN_FLOAT32) for row in again)
                    counts[-1] += f" ({single} of {len(again)} others in float32)"
        if counts:
            yield f"- {title}: {', '.join(counts)}"


def _is_right(row: Mapping[str, Any], axes: Mapping[str, int], way: str) -> bool:
    return bool(row.get(mesh_mode(axes, way), {}).get("status") == "right")


def section(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page, if any mixture was measured."""
    rows: Mapping[str, Mapping[str, Any]] = results["rows"]
    ways = [way for way in _COLUMNS if any(mode in row for row in rows.values() for mode in MODES[way])]
    if not ways:
        return
    yield (
        "The rows whose model has stacked experts, on 4 ranks, each data-parallel rank with token ids of its own. A "
        "mixture is right (✓) where the logits and every parameter's gradient agree on every rank with one process. "
        "Parameters that a class keeps in float32 stay in it, and all code computes in float64."
    )
    if "transformers" in ways:
        yield (
            "transformers' own expert parallelism (`DistributedConfig(fsdp_size=..., tp_size=..., ep_size=...)`) has "
            "the same weights, meshes and tokens. An error of a gradient is relative to its largest element. What is "
            "wrong in float64 was measured again in float32 where the cell says so. Gradients of experts off by 0.5 or "
            "0.75 are a half or a quarter of what they have to be, without an error: with `ep` as large as `fsdp · tp` "
            "FSDP2 divides gradients in float64 and float16 by the given number of ranks twice, those in float32 and "
            "bfloat16 once."
        )
    yield ""
    yield from summary(rows)
    yield ""
    columns = [
        (f"transformers, {mesh_mode(axes)}" if way == "transformers" else mesh_mode(axes), axes, way)
        for way in ways
        for axes in MESHES
    ]
    found = {name: {title: _outcome(rows[name], axes, way) for title, axes, way in columns} for name in sorted(rows)}
    titles = ["row", *(title for title, _, _ in columns), "notes"]
    yield from table(titles, (_cells(name, told) for name, told in found.items() if any(told.values())))


def _cells(name: str, told: Mapping[str, str]) -> list[Cell]:
    """Return a row: outcomes that are short in their cells, the others as notes below their marks."""
    notes = [f"{title}: {outcome}" for title, outcome in told.items() if len(outcome) > _LONGEST]
    return [name, *(outcome if len(outcome) <= _LONGEST else _mark(outcome) for outcome in told.values()), notes]


def _mark(outcome: str) -> str:
    """Return the mark that a long outcome begins with."""
    return next((mark for mark in _MARKS.values() if outcome.startswith(mark)), "✗ wrong")


def _outcome(row: Mapping[str, Any], axes: Mapping[str, int], way: str) -> str:
    found, again = row.get(mesh_mode(axes, way)), None
    if way == "transformers":
        again = row.get(mesh_mode(axes, IN_FLOAT32))
    return f"{_cell(found)}; in float32 {_cell(again)}" if again else _cell(found)


def _cell(found: Mapping[str, Any] | None) -> str:
    """Return the mark of an outcome and, where it is not right, what is wrong and by how much."""
    if found is None:
        return ""
    note = re.sub(r"\s+", " ", found.get("note", "")).replace("|", "\\|")
    if found["status"] == "wrong":
        return f"✗ {_wrong(note)}"
    mark = _MARKS[found["status"]]
    return f"{mark}: {note}" if note else mark


def _wrong(note: str) -> str:
    """Return the mismatches of a note, those of experts' gradients as one."""
    parts = note.split("; ")
    found = [
        re.fullmatch(r"gradient of (\S+\.experts\.\S+) off by (\S+) of its largest element", part) for part in parts
    ]
    errors = [match[2] for match in found if match]
    others = [part for part, match in zip(parts, found, strict=True) if not match]
    told = [f"gradients of experts off by {max(errors, key=float)}"] if errors else []
    told += others[:_NAMED] + [f"and {len(others) - _NAMED} more"] * (len(others) > _NAMED)
    return "; ".join(told)
