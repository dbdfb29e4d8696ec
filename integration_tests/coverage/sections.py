"""Measure the models of the page's further sections: every head of every architecture, and multimodal models.

Each section has its own key in the results.  A row is kept on disk as soon as it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from coverage import heads_page, multimodal_page
from coverage.heads import head_rows
from coverage.heads_measure import evaluate_head
from coverage.multimodal import multimodal_classes
from coverage.multimodal_absent import COLUMNS, evaluate_absent_media
from coverage.multimodal_measure import evaluate_multimodal
from coverage.outcome import Outcome
from harness.ranks import RankPool

#: Takes a row, a column and its outcome: keeps and prints it.
Keep = Callable[[str, dict[str, Any], str, Outcome], None]


@dataclass(frozen=True)
class Choice:
    """What to measure.

    Args:
        patterns: model types, as ``"qwen3*"``.
        modes: ``"TP"``, ``"SP"``, ``"transformers"``.
        timeout: seconds for one class in one mode.
        resume: leave out what the data has.
    """

    patterns: Sequence[str]
    modes: Sequence[str]
    timeout: float
    resume: bool

    def has(self, name: str) -> bool:
        """Return whether a model type is chosen."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def is_due(self, cells: Mapping[str, Any], column: str) -> bool:
        """Return whether a column of a row is to be measured."""
        return not (self.resume and column in cells)


def measure_heads(pool: RankPool, section: dict[str, Any], keep: Keep, choice: Choice) -> None:
    """Measure every head of the chosen model types.

    Args:
        pool: the ranks of ``tp``.
        section: the section's data, by model type and head, which is changed.
        keep: takes what was found.
        choice: what to measure.
    """
    for row in head_rows():
        if not choice.has(row.model_type):
            continue
        cells = section.setdefault(row.model_type, {}).setdefault(row.head, {"class": row.class_name})
        for mode in choice.modes:
            if choice.is_due(cells, mode):
                found = evaluate_head(pool, row, mode, timeout=choice.timeout)
                keep(f"{row.model_type}, {row.head}", cells, mode, found)


def measure_multimodal_models(pool: RankPool, section: dict[str, Any], keep: Keep, choice: Choice) -> None:
    """Measure the chosen multimodal model types with images, and with the other media that the data has of them.

    A plan with doubts is measured with the doubts accepted, too.  The arguments are those of :func:`measure_heads`.
    """
    for name in multimodal_classes():
        if name in multimodal_page.NOT_MEASURED or not choice.has(name):
            continue
        cells = section.setdefault(name, {})
        alone = multimodal_page.WITHOUT_IMAGES.get(name)
        others = [each for each in multimodal_page.MEDIA if f"TP {each}" in cells or each == alone]
        todo = [(mode, "image", mode) for mode in choice.modes if alone is None]
        todo += [
            (f"{mode} {medium}", medium, mode) for medium in others for mode in choice.modes if mode != "transformers"
        ]
        for column, medium, mode in [*todo, ("inferred", alone or "image", "inferred")]:
            if column == "inferred" and cells.get("TP", {}).get("status") != "refused":
                continue
            if choice.is_due(cells, column):
                found = evaluate_multimodal(pool, name, mode, media=medium, timeout=choice.timeout)
                keep(name, cells, column, found)


def measure_absent_media(pool: RankPool, section: dict[str, Any], keep: Keep, choice: Choice) -> None:
    """Measure the chosen multimodal model types under FSDP2 with media on one of two data-parallel ranks.

    With ``tp`` they are under sequence parallelism too, where the data has that as right.  The arguments are those of
    :func:`measure_heads`.
    """
    four = RankPool(4)
    try:
        for name in multimodal_classes():
            if name in multimodal_page.NOT_MEASURED or not choice.has(name):
                continue
            cells = section.setdefault(name, {})
            alone = multimodal_page.WITHOUT_IMAGES.get(name)
            in_sequence = cells.get(f"SP {alone}" if alone else "SP", {}).get("status") == "right"
            mode, media = "SP" if in_sequence else "TP", alone or "image"
            for column, tp in COLUMNS.items():
                if choice.is_due(cells, column):
                    ranks = pool if tp == 1 else four
                    found = evaluate_absent_media(ranks, name, mode, media=media, timeout=choice.timeout)
                    keep(name, cells, column, found)
    finally:
        four.close()


#: The parts of a run, with the keys of their data.
SECTION_PARTS = {
    "heads": (heads_page.KEY, measure_heads),
    "multimodal": (multimodal_page.KEY, measure_multimodal_models),
    "absent-media": (multimodal_page.KEY, measure_absent_media),
}
