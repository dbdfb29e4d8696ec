"""The results as JSON, the pages that show them, and what has got worse since they were last checked in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coverage import (
    bfloat16_page,
    bfloat16_tensor,
    compiled,
    context_parallel,
    decoders_page,
    expert_page,
    heads_page,
    multimodal_page,
    packed_page,
    stages_page,
    widths,
)
from coverage.cells import table, tally
from coverage.multimodal_absent import COLUMNS
from coverage.outcome import Outcome
from coverage.table import Entry

#: One row: mode to what is kept of its outcome.
Row = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A kind of rows with a page of its own.

    Args:
        title: the page's heading.
        lines: yields what stands below it from the results; nothing where nothing was measured.
        outcomes: takes the results; returns what was measured, each with row to outcome.
        parts: the parts of a run that measure it.
    """

    title: str
    lines: Callable[[Mapping[str, Any]], Iterator[str]]
    outcomes: Callable[[Mapping[str, Any]], Mapping[str, Row]]
    parts: tuple[str, ...]


def _of_rows(*modes: str) -> Callable[[Mapping[str, Any]], Mapping[str, Row]]:
    return lambda results: _by_mode(results["rows"], modes)


def _by_mode(rows: Mapping[str, Row], modes: Sequence[str]) -> dict[str, Row]:
    return {mode: {name: row[mode] for name, row in rows.items() if mode in row} for mode in modes}


def _of_media(results: Mapping[str, Any]) -> dict[str, Row]:
    media = [f"{mode}{medium}" for mode in ("TP", "SP") for medium in ("", " video", " audio")]
    return _by_mode(results.get(multimodal_page.KEY, {}), [*media, *COLUMNS, _THEIRS])


def _of_heads(results: Mapping[str, Any]) -> dict[str, Row]:
    heads = results.get(heads_page.KEY, {})
    return _by_mode({f"{name}, {head}": cells for name, row in heads.items() for head, cells in row.items()}, _WAYS)


#: What the modes of transformers' own parallelism begin with.
_THEIRS = "transformers"
_WAYS = ("TP", "SP", _THEIRS)
#: The kinds of rows, by the name of their page.
KINDS: dict[str, Kind] = {
    "packed": Kind(
        "Packed rows and context parallelism",
        packed_page.section,
        _of_rows("packed", *context_parallel.MODES),
        ("tensor", "context"),
    ),
    "experts": Kind(
        "Expert parallelism",
        expert_page.section,
        _of_rows(*expert_page.MODES["parallelize"]),
        ("experts",),
    ),
    "widths": Kind("Four and eight ranks, and FSDP2", widths.section, _of_rows(*widths.WIDTHS), ("widths",)),
    "bfloat16": Kind(
        "bfloat16",
        bfloat16_page.section,
        _of_rows("bfloat16", *bfloat16_tensor.MODE_NAMES.values()),
        ("bfloat16", "bfloat16-tp"),
    ),
    "compiled": Kind("Compiled blocks", compiled.section, _of_rows(*compiled.OURS), ("compiled",)),
    "stages": Kind("Pipeline stages", stages_page.section, _of_rows(*stages_page.MODES), ("stages",)),
    "multimodal": Kind(
        "Vision-language and audio-language models",
        multimodal_page.section,
        _of_media,
        ("multimodal", "absent-media"),
    ),
    "heads": Kind("Heads", heads_page.section, _of_heads, ("heads",)),
}
#: What a row's notes say of parameters that stay whole: those above this share of the model.
_NOTEWORTHY = 0.01
#: Refused rows that the summary names.
_NAMED = 20


def versions() -> dict[str, str]:
    """The releases that a run was measured on."""
    return {name: version(name).partition("+")[0] for name in ("torch", "transformers")}


def kept(outcome: Outcome) -> dict[str, Any]:
    """Return what is kept of an outcome: nothing that differs from run to run."""
    data: dict[str, Any] = {"status": outcome.status}
    if outcome.note:
        data["note"] = outcome.note
    if outcome.share is not None:
        data["share"] = round(outcome.share, 3)
        data["whole"] = {pattern: round(share, 3) for pattern, share in outcome.whole.items() if share > _NOTEWORTHY}
    return data


def read(path: Path) -> dict[str, Any]:
    """The results in a file, or none."""
    return json.loads(path.read_text()) if path.exists() else {"rows": {}}


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Results to a file, all or nothing."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(path)


def regressions(before: Mapping[str, Row], now: Mapping[str, Row]) -> list[str]:
    """What was right before and is no longer."""
    return [
        f"{name}, {mode}: {now[name][mode]['status']}: {now[name][mode].get('note', '')}"
        for name in before.keys() & now.keys()
        for mode in before[name].keys() & now[name].keys()
        if before[name][mode]["status"] == "right" != now[name][mode]["status"]
    ]


def write_pages(path: Path, results: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    """The pages of a whole run, beside the file of its results."""
    for name, text in pages(results, entries).items():
        page = path.parent / name
        page.parent.mkdir(exist_ok=True)
        page.write_text(text)


def pages(results: Mapping[str, Any], entries: Mapping[str, Entry]) -> dict[str, str]:
    """The pages of a whole run by their paths: ``coverage.md``, and one for each kind of rows that was measured."""
    rows = {name: row for name, row in results["rows"].items() if name in entries}
    shown = {**results, "rows": rows}
    kinds = {
        "decoders": Kind(
            "Decoders", lambda found: decoders_page.section(found, entries), _of_rows(*_WAYS), ("tensor",)
        ),
        **KINDS,
    }
    lines = {name: [*kind.lines(shown)] for name, kind in kinds.items()}
    kinds = {name: kind for name, kind in kinds.items() if lines[name]}
    below = {
        f"coverage/{name}.md": [f"# {kind.title}", "", *_method(results, kind.parts), "", *lines[name]]
        for name, kind in kinds.items()
    }
    texts = {"coverage.md": _summary(shown, kinds), **below}
    return {name: "\n".join(text) + "\n" for name, text in texts.items()}


def _method(results: Mapping[str, Any], parts: Sequence[str]) -> Iterator[str]:
    yield f"Tiny models in float64 on {results['tp']} CPU ranks against one process, unless the text says otherwise."
    releases = _releases(results["versions"], parts)
    yield f"Measured with {releases}; written by `nox -s coverage` from `docs/coverage.json`."


def _releases(versions: Mapping[str, Mapping[str, str]], parts: Sequence[str]) -> str:
    """Return the releases that parts were measured with: those of the first, then others with their parts."""
    found: dict[str, list[str]] = {}
    for part in (each for each in parts if each in versions):
        text = " and ".join(f"{name} {number}" for name, number in versions[part].items())
        found.setdefault(text, []).append(part)
    (first, _), *others = found.items()
    return ", ".join([first, *(f"{' and '.join(names)} with {text}" for text, names in others)])


def _summary(results: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Iterator[str]:
    yield "# Coverage"
    yield ""
    yield from _method(results, [*dict.fromkeys(part for kind in kinds.values() for part in kind.parts)])
    yield "A row is one architecture, or one class of it. It is right where outputs and the gradients of all parameters"
    yield "agree with one process on every rank. Each kind of rows has a page with its method, its table and reasons;"
    yield "that of expert parallelism has transformers' own, too. All of it was measured on CPU ranks."
    yield ""
    measured = {name: kind.outcomes(results) for name, kind in kinds.items()}
    yield from table(
        ["kind of rows", "measured", "outcome"],
        (
            [_link(name, kinds), _title(mode), tally([cell["status"] for cell in row.values()])]
            for name, modes in measured.items()
            for mode, row in modes.items()
            if row
        ),
    )
    yield ""
    yield "## Refused"
    yield ""
    yield "What is refused here before anything changes; the pages have the reasons:"
    yield ""
    for name, modes in measured.items():
        yield from _refused(_link(name, kinds), modes)


def _link(name: str, kinds: Mapping[str, Kind]) -> str:
    return f"[{kinds[name].title}](coverage/{name}.md)"


def _title(mode: str) -> str:
    return mode.replace(_THEIRS, "transformers' own", 1)


def _refused(title: str, modes: Mapping[str, Row]) -> Iterator[str]:
    """Yield a line for each set of refused rows, which several ways may share; of a large set only the number."""
    sets: dict[tuple[str, ...], list[str]] = {}
    for mode, row in modes.items():
        refused = tuple(sorted(name for name, cell in row.items() if cell["status"] == "refused"))
        if refused and not mode.startswith(_THEIRS):
            sets.setdefault(refused, []).append(mode)
    for names, told in sets.items():
        which = "; ".join(names) if len(names) <= _NAMED else f"{len(names)} rows"
        yield f"- {title}, {' and '.join(told)}: {which}"
