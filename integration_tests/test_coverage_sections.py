"""More ranks, bfloat16 and compiled blocks: what counts as right, and what the coverage page says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from coverage import bfloat16_tensor, compiled, widths
from coverage.bfloat16_tensor import FACTOR, best_ratios, judged, measure_bfloat16_tensor
from coverage.compiled import Compiled, compile_is_due, kept, measure_compiled
from coverage.measure import RankResult
from coverage.outcome import ROUNDED, evaluate
from harness.compiler import forget_compiled, graph_breaks
from harness.ranks import RankPool

RIGHT, REFUSED = {"status": "right", "share": 0.99}, {"status": "refused", "note": "6 heads"}


def lines(section: Any, row: dict[str, Any]) -> list[str]:
    return list(section({"rows": {"llama": row}}))


@pytest.mark.parametrize("module", [widths, bfloat16_tensor, compiled])
def test_a_section_has_no_lines_where_nothing_was_measured(module: Any) -> None:
    assert lines(module.section, {"TP": RIGHT}) == []


def test_the_page_shows_each_width_and_why_it_is_refused() -> None:
    row = {"tp=4": RIGHT, "tp=4 SP": RIGHT, "tp=8": REFUSED, "tp=8 SP": REFUSED, "dp_shard=2 tp=2 SP": RIGHT}
    text = lines(widths.section, row)
    assert text[-3:] == ["| llama | ✓ | ✓ | 99.0 % | refused | refused |  | ✓ | 1 |", "", "1. tp=8, tp=8 SP: 6 heads"]
    assert "- tp=8: 0 of 1 right, 1 refused" in text


def test_coverage_measures_fsdp2_without_sp_where_sp_is_refused() -> None:
    assert not widths.is_due({"dp_shard=2 tp=2 SP": RIGHT}, "dp_shard=2 tp=2")
    assert widths.is_due({"dp_shard=2 tp=2 SP": REFUSED}, "dp_shard=2 tp=2")


def test_the_page_shows_how_far_bfloat16_is_from_exact() -> None:
    row = {"bfloat16 tp=2": {"status": "right", "ratio": 1.3}, "bfloat16 tp=2 SP": REFUSED}
    told = ["| llama | ✓ | 1.3 | refused |  | 1 |", "", "1. bfloat16 tp=2 SP: 6 heads"]
    assert lines(bfloat16_tensor.section, row)[-3:] == told


def test_the_page_shows_the_graphs_of_each_length_and_whose_the_breaks_are() -> None:
    broken = {"status": "right", "graphs": [3, 4, 4], "breaks": 2, "reasons": ["data"]}
    row = {"aot_eager TP": broken, "aot_eager SP": REFUSED, "aot_eager one process": {**broken, "breaks": 1}}
    told = ["| llama | ✓ 3, 4, 4 (breaks: 2) | refused | 1 | 1, 2 |", "", "1. aot_eager SP: 6 heads", "2. data"]
    assert lines(compiled.section, row)[-4:] == told


def test_coverage_page_lists_failures_of_one_process_and_third_lengths() -> None:
    right, failed = {"status": "right", "breaks": 0}, {"status": "failed", "note": "view"}
    rows = {
        "llama": {"aot_eager TP": {**right, "graphs": [1, 2, 2]}},
        "mamba": {"aot_eager TP": {**right, "graphs": [1, 2, 3], "breaks": 1}},
        "qwen3_next": {"aot_eager TP": failed, "aot_eager one process": failed},
    }
    text = [*compiled.section({"rows": rows})]
    assert text[-3] == "| qwen3_next | fails in one process, too | failed | 1 |"
    assert text[-1] == "1. aot_eager TP: view"
    assert (
        "- aot_eager TP: 2 of 3 right; 1 without a break; 1 fails in one process without a plan, too; "
        "a third length compiles something in 1 of 2 rows"
    ) in text


def test_coverage_measures_further_lengths_and_breaks_where_they_add() -> None:
    row = {"aot_eager TP": {"status": "right", "graphs": [1], "breaks": 0}, "aot_eager SP": REFUSED}
    due = {mode: compile_is_due(row, mode, (7, 9)) for mode in (*row, "aot_eager one process", "inductor TP")}
    assert due == {"aot_eager TP": True, "aot_eager SP": False, "aot_eager one process": False, "inductor TP": True}
    assert not compile_is_due(row, "aot_eager TP", (7,))
    row["aot_eager TP"]["breaks"] = 2
    assert compile_is_due(row, "aot_eager one process", (7,))


def test_code_that_a_backend_cannot_compile_counts_as_a_break() -> None:
    def failing(*_: Any) -> Any:
        raise DataDependentOutputException(torch.ops.aten.item.default)

    forget_compiled()
    assert torch.compile(torch.sin, backend=failing)(torch.zeros(1)) == 0
    assert ["aten.item.default" in reason for reason in graph_breaks()] == [True]


def outcome(*batches: float, problems: tuple[str, ...] = ()) -> dict[str, Any]:
    """The outcome of a split model whose results are off by so many roundings, where one process's are off by one."""
    exact = torch.ones(64, dtype=torch.float64)
    results = [({"w": exact}, {"w": exact + 2**-8}, {"w": exact + times * 2**-8}) for times in batches]
    return judged(best_ratios(results, largest=float), problems)


def test_an_error_as_large_as_that_of_one_process_is_right_and_a_larger_one_is_not() -> None:
    assert outcome(-1.0) == {"status": "right", "ratio": 1.0}
    wrong = outcome(3.0)
    assert (wrong["status"], wrong["note"]) == ("wrong", "w 3.0 times as far from exact")
    assert outcome(float("nan"))["status"] == "wrong"
    assert outcome(1.0, problems=("w is in float32",))["status"] == "wrong"


def test_the_best_batch_counts_since_tokens_near_a_tie_go_to_other_experts() -> None:
    assert outcome(300.0, 1.0)["status"] == outcome(float("nan"), 1.0)["status"] == "right"
    assert outcome(300.0, 200.0)["status"] == "wrong"


def test_compiled_blocks_keep_the_worst_result_of_all_ranks() -> None:
    found = kept([Compiled((), (1, 2), {}), Compiled(("w off",), (2, 2), {"data in /a/b/c.py": 3})])
    assert found == {"status": "wrong", "graphs": [2, 2], "breaks": 3, "note": "w off", "reasons": ["data in c.py"]}


def test_rounding_of_float32_parts_alone_is_right_with_a_note() -> None:
    class Answering(RankPool):
        def run(self, *_: Any, float64: bool, **__: Any) -> list[Any]:
            return [RankResult({"ids": 0.0 if float64 else 1e-3}, {}, [], 1, {})]

    found = evaluate(Answering(1), "llama", "TP", kinds=("ids",), timeout=1)
    assert (found.status, found.note) == ("right", f"{ROUNDED} rank 0: output off by 1.0e-03 (ids)")


@pytest.mark.parametrize("name", ["ernie4_5_moe", pytest.param("olmo_hybrid", marks=pytest.mark.slow)])
def test_tensor_parallelism_in_bfloat16_is_as_near_to_exact_as_one_process(two_ranks: RankPool, name: str) -> None:
    for found in two_ranks.run(measure_bfloat16_tensor, name):
        assert {mode: (each["status"], each["ratio"] <= FACTOR) for mode, each in found.items()} == {
            "TP": ("right", True),
            "SP": ("right", True),
        }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["TP", "SP"])
def test_a_second_length_compiles_once_more_and_a_third_does_not(two_ranks: RankPool, mode: str) -> None:
    for found in two_ranks.run(measure_compiled, "llama", mode, backend="aot_eager", timeout=500):
        first, second, third = found.graphs
        assert first < second <= 2 * first
        assert (third, found.errors, found.breaks) == (second, (), {})
