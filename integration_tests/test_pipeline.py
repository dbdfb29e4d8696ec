"""Pipeline stages against the single-process model: losses, logits, gradients and norms on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from coverage.pipeline import PIPELINE_BOUND, measure_pipeline, pipeline_outcome
from coverage.table import coverage_entries
from fsdp_runtime.steps import Pipeline
from harness.ranks import RankPool

#: Each schedule, and each kind of model that other implementations of stages refuse.
TWO_RANKS = {
    "mixture with MLA": ("deepseek_v3", Pipeline(), {}),
    "tied, sliding and full attention": ("gemma2", Pipeline("GPipe"), {"activation_checkpointing": "block"}),
    "shared keys, per-layer inputs, interleaved": ("gemma4_text", Pipeline("Interleaved1F1B"), {}),
    "shared keys, per-layer inputs, V": ("gemma4_text", Pipeline("ZBVZeroBubble"), {}),
    "adapters": ("gemma2", Pipeline(), {"adapted": True}),
    "hybrid of a vision model": ("qwen3_5, vision", Pipeline(layers=(1, 1)), {}),
    "packed rows of a hybrid": ("qwen3_next", Pipeline(), {"packed": True, "packed_sequences": True}),
}
FOUR_RANKS = {
    "four stages, tied": ("gemma4_text", {"pp": 4}, {}),
    "SP": ("llama", {"pp": 2, "tp": 2}, {"sequence_parallel": True}),
    "EP": ("deepseek_v3", {"pp": 2, "tp": 2, "ep": 2}, {}),
    "FSDP2": ("gemma2", {"pp": 2, "dp_shard": 2}, {}),
}


def _assert_right(reports: list[dict[str, float]]) -> None:
    errors = [{name: error for name, error in each.items() if not error <= PIPELINE_BOUND} for each in reports]
    assert not any(errors), errors
    assert sum("logits" in each for each in reports) in (1, 2)  # the last stage's ranks have outputs


@pytest.mark.parametrize("case", TWO_RANKS)
def test_stages_on_two_ranks_match_the_whole_model(case: str, two_ranks: RankPool) -> None:
    name, step, options = TWO_RANKS[case]
    _assert_right(two_ranks.run(measure_pipeline, name, {"pp": 2}, step, **options))


@pytest.mark.parametrize("case", FOUR_RANKS)
def test_stages_with_another_axis_match_the_whole_model(case: str, four_ranks: RankPool) -> None:
    name, axes, options = FOUR_RANKS[case]
    _assert_right(four_ranks.run(measure_pipeline, name, axes, Pipeline(), **options))


#: Rows of the coverage table that are refused: they run a block several times, or read blocks after the last one.
REFUSED = {"dory", "hrm_text", "inkling2_loop_text", "inkling2_text", "rwkv"}


@pytest.mark.slow
def test_stages_of_every_architecture_are_right_or_refused(two_ranks: RankPool) -> None:
    statuses: dict[str, set[str]] = {}
    for name in sorted(set(coverage_entries()) - {"gemma3n"}):
        outcomes: list[Mapping[str, Any]] = two_ranks.run(pipeline_outcome, name, {"pp": 2}, Pipeline(), timeout=120)
        statuses.setdefault(",".join(sorted({str(each["status"]) for each in outcomes})), set()).add(name)
    assert statuses.pop("refused") == REFUSED
    assert set(statuses) == {"right"}
    assert len(statuses["right"]) >= 150
