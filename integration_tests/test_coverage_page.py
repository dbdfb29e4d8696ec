"""The pages of a run of all architectures, and the results that count as worse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coverage import page
from coverage.cells import NO_PLAN, table
from coverage.expert_page import MODES
from coverage.expert_parallel import MESHES
from coverage.measure import RankResult
from coverage.outcome import Outcome, evaluate, evaluate_experts, summarize
from coverage.run import PARTS
from coverage.sections import SECTION_PARTS
from coverage.table import Entry, coverage_entries
from harness.parity import RankReport
from harness.ranks import RankError, RankPool, RanksFailed

DOCS = Path(__file__).parents[1] / "docs"
RIGHT, REFUSED = {"status": "right", "share": 0.99, "whole": {}}, {"status": "refused", "note": "no heads | no split"}
ENTRIES = {
    "llama": Entry("llama", "llama", "LlamaForCausalLM", shipped=True),
    "phi": Entry("phi", "phi", "PhiForCausalLM"),
}
RESULTS = {
    "tp": 2,
    "versions": {
        **{part: {"torch": "2.13.0", "transformers": "5.24.0"} for part in [*PARTS, *SECTION_PARTS]},
        "context": {"torch": "2.13.0", "transformers": "5.23.0"},
    },
    "rows": {"phi": {"TP": RIGHT, "SP": REFUSED}, "llama": {"TP": RIGHT, "SP": RIGHT}},
}


def found(**changes: Any) -> RankResult:
    base = {"output_errors": {"ids": 0.0}, "gradient_errors": {"w": 0.0}, "problems": [], "reached": 200, "whole": {}}
    return RankResult(**{**base, **changes})


class FailingPool(RankPool):
    """A pool of ranks that failed as told."""

    def __init__(self, errors: dict[int, RankError]) -> None:
        super().__init__(2)
        self.errors = errors

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        raise RanksFailed(self.errors)


def failure(*errors: tuple[str, str]) -> Outcome:
    pool = FailingPool({rank: RankError(name, message, "") for rank, (name, message) in enumerate(errors)})
    return evaluate(pool, "llama", "TP", kinds=("ids",), timeout=1)


def test_heads_have_a_section_with_counts_and_each_reason_once() -> None:
    refused = {"status": "refused", "note": "no form | none"}
    theirs = {"status": "refused", "note": NO_PLAN}
    cells = {
        "trunk": {"TP": {"status": "right"}, "SP": refused, "transformers": theirs},
        "reward": {"TP": {"status": "wrong"}, "SP": refused, "transformers": {"status": "hung", "note": "late"}},
    }
    text = page.pages({**RESULTS, "heads": {"phi": cells}}, ENTRIES)["coverage/heads.md"]
    assert "- TP: 1 of 2 right, 1 wrong" in text
    assert "- SP: 0 of 2 right, 2 refused" in text
    assert "- transformers' own TP: 0 of 2 right, 1 refused, 1 hung" in text
    marks = "✓, refused, refused | ✗ wrong, refused, ✗ hangs"
    assert f"| phi | {marks} | 1, 2 |" in text
    assert text.endswith("\n\n1. trunk, SP: no form | none\n2. reward, transformers' own TP: late\n")


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


def test_results_leave_out_values_that_differ_between_runs() -> None:
    slow, fast = (Outcome("right", "", 0.9876, {"norm": 0.0124, "scale": 0.001}, seconds) for seconds in (90.0, 1.0))
    assert page.kept(slow) == page.kept(fast) == {"status": "right", "share": 0.988, "whole": {"norm": 0.012}}
    assert json.dumps(page.kept(slow))


def test_the_page_counts_and_lists_every_row() -> None:
    text = page.pages(RESULTS, ENTRIES)["coverage/decoders.md"]
    assert "Measured with torch 2.13.0 and transformers 5.24.0; written" in text
    assert "- SP: 1 of 1 right (1 with at least 95 % split) that transformers ships a plan for; 0 of 1 right" in text
    assert "| llama | LlamaForCausalLM | ✓ | ✓ | 99.0 % |  |" in text
    assert "| phi | PhiForCausalLM | ✓ | refused | 99.0 % | 1 |\n\n1. SP: no heads | no split\n" in text


def test_summary_page_counts_kinds_of_rows_and_names_refusals() -> None:
    text = page.pages(RESULTS, ENTRIES)["coverage.md"]
    assert "| [Decoders](coverage/decoders.md) | SP | 1 of 2 right, 1 refused |" in text
    assert text.endswith("\n- [Decoders](coverage/decoders.md), SP: phi\n")


def test_a_kind_of_rows_has_a_page_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = page.Kind(
        title="Kinds",
        lines=lambda found: iter([str(found["heads"])] if "heads" in found else []),
        outcomes=lambda _: {},
        parts=("tensor", "context"),
    )
    monkeypatch.setattr(page, "KINDS", {"kinds": kind})
    text = page.pages({**RESULTS, "heads": 3}, ENTRIES)["coverage/kinds.md"]
    assert text.endswith("\n\n3\n")
    assert "torch 2.13.0 and transformers 5.24.0, context with torch 2.13.0 and transformers 5.23.0; written" in text
    assert page.pages(RESULTS, ENTRIES).keys() == {"coverage.md", "coverage/decoders.md"}


def test_equal_notes_of_a_table_have_one_number() -> None:
    lines = [*table(["row", "notes"], [["a", ["x", "y"]], ["b", []], ["c", ["y"]]])]
    assert lines[2:] == ["| a | 1, 2 |", "| b |  |", "| c | 2 |", "", "1. x", "2. y"]


def test_checked_in_pages_show_the_checked_in_results() -> None:
    expected = page.pages(page.read(DOCS / "coverage.json"), coverage_entries())
    found = {str(path.relative_to(DOCS)) for path in (DOCS / "coverage").glob("*.md")} | {"coverage.md"}
    assert found == expected.keys()
    assert [name for name in expected if (DOCS / name).read_text() != expected[name]] == []


def test_the_page_shows_transformers_own_where_it_was_run() -> None:
    rows = {"llama": {"TP": RIGHT, "transformers": {**RIGHT, "share": 0.5}}}
    text = page.pages({**RESULTS, "rows": rows}, ENTRIES)["coverage/decoders.md"]
    assert "| llama | LlamaForCausalLM | ✓ |  | 99.0 % | ✓ | 50.0 % |  |" in text


def _with_experts(way: str, *statuses: dict[str, Any]) -> str:
    rows = {"phi": {"TP": RIGHT}, "llama": {"TP": RIGHT, **dict(zip(MODES[way], statuses, strict=True))}}
    return page.pages({**RESULTS, "rows": rows}, ENTRIES)["coverage/experts.md"]


def test_expert_page_has_a_column_for_every_mesh() -> None:
    text = _with_experts("parallelize", RIGHT, RIGHT, {"status": "wrong", "note": "output off by 1e-2"})
    assert "| row | dp_shard=2 tp=2 ep=2 | dp_shard=2 tp=2 ep=4 | dp_shard=4 ep=4 | notes |" in text
    assert "| llama | ✓ | ✓ | ✗ output off by 1e-2 |  |" in text
    assert "1 of 1 mixtures right on dp_shard=2 tp=2 ep=4, 0 of 1 mixtures right on dp_shard=4 ep=4" in text
    assert "coverage/experts.md" not in page.pages(RESULTS, ENTRIES)


def test_expert_page_tells_wrong_experts_and_their_errors() -> None:
    experts = "gradient of m.*.experts.{} off by {} of its largest element"
    wrong = {"status": "wrong", "note": f"{experts.format('up', 0.5)}; {experts.format('down', 0.25)}; a; b; c"}
    text = _with_experts("transformers", wrong, REFUSED, {"status": "failed", "note": "x" * 200})
    assert (
        "✗ gradients of experts off by 0.5; a; b; and 1 more | refused: no heads \\| no split | ✗ fails | 1 |" in text
    )
    assert f"\n1. transformers, dp_shard=4 ep=4: ✗ fails: {'x' * 200}\n" in text


def test_ranks_that_fail_are_an_outcome() -> None:
    pool = FailingPool({0: RankError("Refused", "ep=4", "")})
    assert evaluate_experts(pool, "llama", MESHES[0], timeout=1).status == "refused"


def test_expert_page_tells_an_error_once_for_all_layers_and_ranks() -> None:
    class Answering(FailingPool):
        def run(self, *args: Any, **kwargs: Any) -> list[Any]:
            errors = {"layers.0.up": 0.25, "layers.1.up": 0.5, "norm": 0.0}
            return [[RankReport(0.0, errors, [])], [RankReport(1e-2, {"norm": float("nan")}, ["ties: broken"])]]

    found = evaluate_experts(Answering({}), "llama", MESHES[0], timeout=1)
    off = "gradient of {} off by {} of its largest element"
    assert (
        found.note
        == f"ties: broken; output off by 1.0e-02; {off.format('layers.*.up', 0.5)}; {off.format('norm', 'nan')}"
    )


def test_expert_page_marks_errors_in_float64_alone() -> None:
    wrong = {"status": "wrong", "note": "a"}
    modes = [MODES[way][0] for way in ("transformers", "transformers in float32")]
    rows = {"llama": dict(zip(modes, (wrong, RIGHT), strict=True))}
    text = page.pages({**RESULTS, "rows": rows}, ENTRIES)["coverage/experts.md"]
    assert "| llama | ✗ a; in float32 ✓ |" in text
    assert "0 of 1 mixtures right on dp_shard=2 tp=2 ep=2 (1 of 1 others in float32)" in text


def test_multimodal_rows_are_shown_next_to_transformers_own() -> None:
    row = {"TP": RIGHT, "SP": REFUSED, "TP video": RIGHT, "SP video": RIGHT, "TP audio": RIGHT, "SP audio": REFUSED}
    theirs = {"status": "right", "share": 0.5, "whole": {}}
    without = {"media on one rank, dp_shard=2": {"status": "alone"}}
    results = {**RESULTS, "multimodal": {"qwen3_vl": {**row, **without, "transformers": theirs}}}
    text = page.pages(results, ENTRIES)["coverage/multimodal.md"]
    absent = ["one process fails", ""]
    cells = ["qwen3_vl", "✓", "refused", "99.0 %", "", "✓", "TP ✓, SP refused", *absent, "✓", "50.0 %"]
    assert "- media on one rank, dp_shard=2: 0 of 1 right, 1 fail in one process" in text
    assert f"| {' | '.join(cells)} | 1 |\n\n1. SP, SP audio: no heads | no split\n" in text
    assert "- TP, with images: 1 of 1 right (1 with at least 95 % split)" in text
    assert "coverage/multimodal.md" not in page.pages(RESULTS, ENTRIES)
