"""A fixed choice of changed configs, and what the tool that tries all of them says of faults."""

from __future__ import annotations

from typing import Any
from unittest import mock

from coverage.table import coverage_entries
from harness.ranks import RankPool
from options import measure
from options.changes import changed_field, changes_of, other_values
from options.measure import Outcome, measure_change
from options.run import Case, outcome

#: Row, change and mode of configs that one process runs: each was refused, raised or was wrong once.
RIGHT: list[tuple[str, dict[str, Any], str]] = [
    ("glm4_moe_lite", {"q_lora_rank": None}, "SP"),  # queries without a rule in the shipped plan
    ("doge", {"num_key_value_heads": 1}, "SP"),  # a mask of the one head that ranks share
    ("mimo_v2_flash", {"v_head_dim": 12, "num_key_value_heads": 2}, "TP"),  # heads of values of another size
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "TP"),  # a shared expert without features
    ("mistral", {"hidden_act": "xielu"}, "SP"),  # learned scalars, of which each rank sees its own columns only
    ("granitemoeshared", {"hidden_act": "xielu"}, "TP"),  # in an expert, and where features are gathered
    ("deepseek_v3", {"n_shared_experts": 0}, "SP"),
]
#: Those that cannot be split, and are refused with the sizes.
REFUSED = [
    ("gpt_neox", {"num_attention_heads": 1}, "TP"),  # raised a raw error
    ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}, "TP"),
]


def outcomes(cases: list[tuple[str, dict[str, Any], str]]) -> list[Outcome]:
    """Return what this rank finds of each case."""
    return [measure_change(*case) for case in cases]


def test_a_choice_of_changed_configs_is_right_or_refused(two_ranks: RankPool) -> None:
    for found in two_ranks.run(outcomes, [*RIGHT, *REFUSED]):
        assert [(each.status, each.note) for each in found[: len(RIGHT)]] == [("right", "")] * len(RIGHT)
        assert [each.status for each in found[len(RIGHT) :]] == ["refused"] * len(REFUSED)


def _spoilt(model: Any, mesh: Any, **options: Any) -> Any:
    next(model.parameters()).data.add_(1.0)
    if options["way"] == "refused":
        raise measure.TpPlansError("after a change")
    return model


def faults() -> list[Outcome]:
    """Return what is said of a model that is changed, with and without a typed error."""
    found = []
    for way in ("refused", "applied"):
        with mock.patch.dict(measure.MODES, {way: lambda *args, way=way, **options: _spoilt(*args, way=way)}):
            found.append(measure_change("llama", {"attention_bias": True}, way))
    return found


def test_a_change_before_a_refusal_and_wrong_numbers_are_failures(two_ranks: RankPool) -> None:
    refused, applied = two_ranks.run(faults)[0]
    assert {refused.status, applied.status} == {"failed"}
    assert "changed before it was refused: ['outputs, ids, off by" in refused.note
    assert "off by" in applied.note


def test_what_one_process_cannot_run_is_no_failure(two_ranks: RankPool) -> None:
    found = outcome(two_ranks, Case("qwen3", {"num_key_value_heads": 3}, "TP"))
    assert found.status == "unbuildable"


def test_every_kind_of_field_is_changed() -> None:
    assert other_values("mlp_bias", False) == [True]
    assert other_values("q_lora_rank", 24) == [0, 1, 12, 25, 72, 48, None]
    assert other_values("q_lora_rank", None) == [24]
    assert "gelu" in other_values("hidden_act", "silu")
    assert other_values("layer_types", ["full", "sliding"]) == [["sliding", "full"], ["full"] * 2, ["sliding"] * 2]
    changed = {changed_field(each) for each in changes_of(coverage_entries()["glm4_moe_lite"])}
    assert {"q_lora_rank", "n_shared_experts", "attention_bias", "hidden_act", "tie_word_embeddings"} <= changed
    assert not changed & {"vocab", "use_cache", "attention_dropout", "pad_token_id", "initializer_range"}
