"""Each refusal is provoked: the error has its class, its file and its message, and no model has changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from harness.ranks import RankPool
from refusals import architectures, around, calls, context, documents, layers, pipeline, plans, ranks, stages
from refusals.outcomes import Raised, outcome

#: The check of a plan raises one error for the findings of all its files.
CHECKS, REPORT = "tp_plans/checks/", "tp_plans/checks/report.py"


def _cases(*modules: Any) -> dict[tuple[str, str], Any]:
    files = [entry for module in modules for entry in module.CASES.items()]
    return {(file, text): call for file, texts in files for text, call in texts.items()}


CASES = _cases(calls, architectures, plans, documents, layers, context, around, pipeline)
ON_RANKS = _cases(ranks, stages)


def _assert_refused(file: str, text: str, errors: Sequence[Raised]) -> None:
    """Check that one of our files raised the error, or an error that it was raised from."""
    kind, _, message = text.partition(": ")
    raised_in = REPORT if file.startswith(CHECKS) else file
    assert errors, f"{file} raised no {text!r}"
    assert errors[0].file, errors  # not an assertion of the call, nor an error of torch
    assert any(e.error == kind and message in e.message and e.file.endswith(raised_in) for e in errors), errors


@pytest.mark.parametrize(("file", "text"), CASES, ids=lambda value: re.sub(r"\W+", "-", value)[:60])
def test_refusal_has_its_class_file_and_message(file: str, text: str) -> None:
    calls = CASES[file, text]
    for call in calls if isinstance(calls, tuple) else (calls,):
        _assert_refused(file, text, outcome(call))


def on_this_rank() -> list[list[Raised]]:
    """Outcome of each call that needs ranks."""
    return [outcome(call) for call in ON_RANKS.values()]


def test_refusals_of_ranks_that_differ_are_raised_on_every_rank(two_ranks: RankPool) -> None:
    for outcomes in two_ranks.run(on_this_rank):
        for (file, text), errors in zip(ON_RANKS, outcomes, strict=True):
            _assert_refused(file, text, errors)
