"""A fixed choice of changed configs, and the verdicts on planted faults."""

from __future__ import annotations

from typing import Any
from unittest import mock

from combinations import field_results
from combinations.field_results import measure_change
from combinations.fields import FieldCase, changed_field, changes_of, other_values
from combinations.run import _parsed, outcome
from combinations.scenario import ALONE, FAILED, REFUSED, RIGHT, Result
from coverage.table import coverage_entries
from harness.ranks import RankPool

#: Row, change and mode of configs that one process runs: each was refused, raised or was wrong once.
RIGHT_CASES: list[tuple[str, dict[str, Any], str]] = [
    ("glm4_moe_lite", {"q_lora_rank": None}, "SP"),  # queries without a rule in the shipped plan
    ("doge", {"num_key_value_heads": 1}, "SP"),  # a mask of the one head that ranks share
    ("mimo_v2_flash", {"v_head_dim": 12, "num_key_value_heads": 2}, "TP"),  # heads of values of another size
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "TP"),  # a shared expert without features
    ("mistral", {"hidden_act": "xielu"}, "SP"),  # learned scalars, of which each rank sees its own columns only
    ("granitemoeshared", {"hidden_act": "xielu"}, "TP"),  # in an expert, and where features are gathered
    ("deepseek_v3", {"n_shared_experts": 0}, "SP"),
]
#: Configs that cannot be split: refused with the sizes.
REFUSED_CASES = [
    ("gpt_neox", {"num_attention_heads": 1}, "TP"),  # raised a raw error
    ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}, "TP"),
]


def results(cases: list[tuple[str, dict[str, Any], str]]) -> list[Result]:
    """Return this rank's result of each case."""
    return [measure_change(FieldCase(*case)) for case in cases]


def test_measure_change_finds_configs_right_or_refused(two_ranks: RankPool) -> None:
    for outcomes in two_ranks.run(results, [*RIGHT_CASES, *REFUSED_CASES]):
        assert outcomes[: len(RIGHT_CASES)] == [Result(RIGHT)] * len(RIGHT_CASES)
        assert [result.outcome for result in outcomes[len(RIGHT_CASES) :]] == [REFUSED] * len(REFUSED_CASES)


def _spoilt(model: Any, mesh: Any, *, mode: str) -> Any:
    next(model.parameters()).data.add_(1.0)
    if mode == "refused":
        raise field_results.TpPlansError("after a change")
    return model


def faults() -> list[Result]:
    """Return the results of a model that is changed, with and without a typed error."""
    outcomes = []
    for mode in ("refused", "applied"):
        planted = {mode: lambda model, mesh, mode=mode, **options: _spoilt(model, mesh, mode=mode)}
        with mock.patch.dict(field_results.MODES, planted):
            outcomes.append(measure_change(FieldCase("llama", {"attention_bias": True}, mode)))
    return outcomes


def test_measure_change_fails_changes_before_a_refusal_and_wrong_numbers(two_ranks: RankPool) -> None:
    refused, applied = two_ranks.run(faults)[0]
    assert {refused.outcome, applied.outcome} == {FAILED}
    assert "changed before it was refused: ['outputs, ids, off by" in refused.detail
    assert "off by" in applied.detail


def test_outcome_of_a_config_that_one_process_cannot_run_is_no_failure(two_ranks: RankPool) -> None:
    assert outcome(two_ranks, FieldCase("qwen3", {"num_key_value_heads": 3}, "TP")).outcome == ALONE


def test_field_case_is_repeated_from_its_line() -> None:
    case = FieldCase("qwen3", {"attention_bias": True}, "SP")
    assert _parsed(case.to_json()) == case


def test_other_values_and_changes_of_reach_every_kind_of_field() -> None:
    assert other_values("mlp_bias", False) == [True]
    assert other_values("q_lora_rank", 24) == [0, 1, 12, 25, 72, 48, None]
    assert other_values("q_lora_rank", None) == [24]
    assert "gelu" in other_values("hidden_act", "silu")
    assert other_values("layer_types", ["full", "sliding"]) == [["sliding", "full"], ["full"] * 2, ["sliding"] * 2]
    changed = {changed_field(change) for change in changes_of(coverage_entries()["glm4_moe_lite"])}
    assert {"q_lora_rank", "n_shared_experts", "attention_bias", "hidden_act", "tie_word_embeddings"} <= changed
    assert not changed & {"vocab", "use_cache", "attention_dropout", "pad_token_id", "initializer_range"}
