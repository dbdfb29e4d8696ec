"""What is written of a run of all architectures, and what counts as worse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from architecture_matrix import page
from architecture_matrix.expert_parallel import MESHES
from architecture_matrix.measure import RankResult
from architecture_matrix.outcome import Outcome, evaluate, evaluate_experts, summarize
from architecture_matrix.table import Entry
from harness.ranks import RankError, RankPool, RanksFailed

RIGHT, REFUSED = {"status": "right", "share": 0.99, "whole": {}}, {"status": "refused", "note": "no heads | no split"}
ENTRIES = {
    "llama": Entry("llama", "llama", "LlamaForCausalLM", shipped=True),
    "phi": Entry("phi", "phi", "PhiForCausalLM"),
}
RESULTS = {
    "tp": 2,
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    "rows": {"phi": {"TP": RIGHT, "SP": REFUSED}, "llama": {"TP": RIGHT, "SP": RIGHT}},
}


def found(**changes: Any) -> RankResult:
    base = {"output_errors": {"ids": 0.0}, "gradient_errors": {"w": 0.0}, "problems": [], "reached": 200, "whole": {}}
    return RankResult(**{**base, **changes})


class FailingPool(RankPool):
    """A pool whose ranks failed as told."""

    def __init__(self, errors: dict[int, RankError]) -> None:
        super().__init__(2)
        self.errors = errors

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        raise RanksFailed(self.errors)


def failure(*errors: tuple[str, str]) -> Outcome:
    pool = FailingPool({rank: RankError(name, message, "") for rank, (name, message) in enumerate(errors)})
    return evaluate(pool, "llama", "TP", kinds=("ids",), timeout=1)


def test_agreement_on_every_rank_is_right() -> None:
    assert summarize([found(), found()]).status == "right"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"output_errors": {"ids": 1e-4}}, "rank 1: output off by 1.0e-04 (ids)"),
        ({"output_errors": {"ids": float("nan")}}, "rank 1: output off by nan (ids)"),
        ({"gradient_errors": {"w": 1e-3}}, "rank 1: gradient of w off by 1.0e-03"),
        ({"gradient_errors": {"w": float("inf")}}, "rank 1: gradient of w off by inf"),
        ({"problems": ["ties: broken"]}, "ties: broken"),
    ],
)
def test_a_fault_on_one_rank_is_wrong_and_named(fault: dict[str, Any], told: str) -> None:
    result = summarize([found(), found(**fault)])
    assert (result.status, result.note) == ("wrong", told)


def test_the_share_counts_the_bytes_that_are_sharded() -> None:
    result = summarize([found(whole={"norm": 10, "head": 40})] * 2)
    assert result.share == pytest.approx(0.75)
    assert list(result.whole) == ["head", "norm"]


def test_a_failure_is_reported_by_the_rank_that_caused_it() -> None:
    caused = ("TypeError", "no such thing")
    assert failure(("RuntimeError", "gloo: connection reset"), caused).note.startswith("TypeError: no such thing")
    assert failure(("Stranded", "no answer"), caused).status == "failed"


def test_refusals_and_hangs_are_distinguished() -> None:
    assert failure(("Refused", "heads"), ("Refused", "heads")) == Outcome(
        "refused", "heads", seconds=pytest.approx(0, abs=1)
    )
    assert failure(("Stranded", "no answer"), ("Stranded", "no answer")).status == "hung"


def test_only_what_was_right_can_get_worse() -> None:
    before = {"a": {"TP": RIGHT, "SP": REFUSED}, "b": {"TP": RIGHT}, "gone": {"TP": RIGHT}}
    now = {"a": {"TP": RIGHT, "SP": REFUSED}, "b": {"TP": REFUSED}, "new": {"TP": REFUSED}}
    assert page.regressions(before, now) == ["b, TP: refused: no heads | no split"]


def test_results_are_read_back_as_written(tmp_path: Path) -> None:
    page.write(tmp_path / "coverage.json", RESULTS)
    assert page.read(tmp_path / "coverage.json") == RESULTS
    assert page.read(tmp_path / "nothing.json") == {"rows": {}}


def test_results_do_not_contain_what_differs_between_runs() -> None:
    slow, fast = (Outcome("right", "", 0.9876, {"norm": 0.0124, "scale": 0.001}, seconds) for seconds in (90.0, 1.0))
    assert page.kept(slow) == page.kept(fast) == {"status": "right", "share": 0.988, "whole": {"norm": 0.012}}
    assert json.dumps(page.kept(slow))


def test_the_page_counts_and_lists_every_row() -> None:
    text = page.markdown(RESULTS, ENTRIES)
    assert "torch 2.13.0 and transformers 5.23.0" in text
    assert "- SP: 1 of 1 right (1 with at least 95 % split) that transformers ships a plan for; 0 of 1 right" in text
    assert "| llama | LlamaForCausalLM | ✓ | ✓ | 99.0 % |  |" in text
    assert "| phi | PhiForCausalLM | ✓ | refused | 99.0 % | SP: no heads \\| no split |" in text


def test_the_page_shows_transformers_own_where_it_was_run() -> None:
    rows = {"llama": {"TP": RIGHT, "transformers": {**RIGHT, "share": 0.5}}}
    assert "| llama | LlamaForCausalLM | ✓ |  | 99.0 % | ✓ | 50.0 % |  |" in page.markdown(
        {**RESULTS, "rows": rows}, ENTRIES
    )


def test_the_page_has_a_column_for_every_mesh_that_mixtures_were_measured_on() -> None:
    modes = [page.mesh_mode(axes) for axes in MESHES]
    wrong = {"status": "wrong", "note": "rank 1: output off"}
    measured = dict(zip(modes, (RIGHT, RIGHT, wrong), strict=True))
    rows = {"phi": {"TP": RIGHT, "SP": RIGHT}, "llama": {"TP": RIGHT, **measured}}
    text = page.markdown({**RESULTS, "rows": rows}, ENTRIES)
    assert "| split | dp_shard=2 tp=2 ep=2 | dp_shard=2 tp=2 ep=4 | dp_shard=4 ep=4 | notes |" in text
    assert "| ✓ | ✓ | ✗ wrong | dp_shard=4 ep=4: rank 1: output off |" in text
    assert "- expert parallelism, dp_shard=2 tp=2 ep=4: 1 of 1 mixtures right" in text
    assert "- expert parallelism, dp_shard=4 ep=4: 0 of 1 mixtures right" in text


def test_ranks_that_fail_are_an_outcome_for_every_mesh() -> None:
    outcomes = evaluate_experts(FailingPool({0: RankError("Refused", "ep=4", "")}), "llama", timeout=1)
    assert [outcome.status for outcome in outcomes] == ["refused"] * len(MESHES)
