"""Every refusal of docs/refusals.md is provoked: its own statement raises its message, and no model has changed."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.ranks import RankPool
from refusals import architectures, around, calls, context, documents, layers, plans, ranks
from refusals.outcomes import Raised, outcome

ROOT = Path(__file__).parents[1]
#: What the report of a check adds to a finding of several modules.
MERGED = r" \(\d+ modules, first [^)]*\)"


def _cases(*modules: Any) -> dict[tuple[str, str], Any]:
    every = [each for module in modules for each in module.CASES.items()]
    return {(file, piece): call for file, pieces in every for piece, call in pieces.items()}


CASES = _cases(calls, architectures, plans, documents, layers, context, around)
ON_RANKS = _cases(ranks)


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refusals_page", ROOT / "docs" / "generate" / "refusals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


page = _generator()


@cache
def _rows() -> list[Any]:
    found: list[Any] = page.rows()
    return found


def _row(file: str, piece: str) -> Any:
    of_file = [row for row in _rows() if row.file == file]
    found = [row for row in of_file if piece in row.message or f"{row.function}: {row.message}".startswith(piece)]
    assert len(found) == 1, f"{len(found)} rows of {file} have {piece!r}"
    return found[0]


def _assert_refused(row: Any, raised: Sequence[Raised]) -> None:
    """Check that an error of our own, or one that it was raised from, comes from a row's own statement."""
    is_ours = bool(raised) and raised[0].file != ""
    assert is_ours and any(each.error == row.error and _says(row, each) for each in raised), (  # noqa: PT018
        f"{row.file}:{row.lines[0]} was to say {row.message!r}, and there was {raised or 'no error'}"
    )


def _says(row: Any, raised: Raised) -> bool:
    here = raised.file.endswith(row.file) and row.lines[0] <= raised.line <= row.lines[1]
    if not row.is_finding:
        return here and bool(row.is_said_by(raised.message))
    found = [re.sub(MERGED, "", line) for line in raised.message.splitlines() if line.startswith("  error: ")]
    return any(row.is_said_by(line.split(": ", 2)[2]) for line in found)


@pytest.mark.parametrize(("file", "piece"), CASES, ids=lambda value: re.sub(r"\W+", "-", value)[:60])
def test_a_refusal_comes_from_its_own_statement_and_changes_nothing(file: str, piece: str) -> None:
    calls = CASES[file, piece]
    for call in calls if isinstance(calls, tuple) else (calls,):
        _assert_refused(_row(file, piece), outcome(call))


def on_this_rank() -> list[list[Raised]]:
    """What each call that needs ranks ends in."""
    return [outcome(call) for call in ON_RANKS.values()]


def test_refusals_of_ranks_that_differ_are_raised_on_all_of_them(two_ranks: RankPool) -> None:
    for outcomes in two_ranks.run(on_this_rank):
        for (file, piece), raised in zip(ON_RANKS, outcomes, strict=True):
            _assert_refused(_row(file, piece), raised)


def test_every_refusal_is_provoked() -> None:
    provoked = {_row(file, piece) for file, piece in (*CASES, *ON_RANKS)}
    assert [f"{row.file}:{row.lines[0]}: {row.message}" for row in _rows() if row not in provoked] == []


SOURCE = """
from package.errors import ModelError, OptionError

_FIX = "call it later"
_TABLE = ((1, "first"), (2, "second"))

class Step:
    def check(self, model):
        for number, name in _TABLE:
            if number == model.number:
                raise OptionError(f"{name} is refused: {_FIX}")
        what = f"{type(model).__name__} has {len(model.blocks)}"
        if model.blocks:
            raise _no_blocks(model)
        raise ModelError(what + "; " + _FIX)

def _no_blocks(model):
    return ModelError(f"no {model.kind!r}")

def _internal():
    raise NotImplementedError("not one of ours")
"""


def test_rows_have_what_the_source_says_of_each_message(tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text(SOURCE)
    rows = page.Source(tmp_path / "source.py", "source.py").rows()
    assert [(row.function, row.error, row.message) for row in rows] == [
        ("Step.check", "OptionError", "first is refused: call it later"),
        ("Step.check", "OptionError", "second is refused: call it later"),
        ("Step.check", "ModelError", "no {kind}"),
        ("Step.check", "ModelError", "{class of model} has {number of blocks}; call it later"),
    ]
    assert rows[3].is_said_by("Llama has 2; call it later")
    assert not rows[3].is_said_by("Llama has 2")


def test_the_page_is_up_to_date() -> None:
    assert page.PAGE.read_text() == page.page(), "run docs/generate/refusals.py"
