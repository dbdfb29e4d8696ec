"""The factors of an adapter: split where the layer is, whole where the rank is."""

from __future__ import annotations

import pytest

from tp_plans import (
    ColwiseParallel,
    NoParallel,
    Partial,
    PlanError,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    VocabParallelEmbedding,
)
from tp_plans.styles import GatheredParameters, MLAKVProjection
from tp_plans.styles.adapters import adapter_styles


@pytest.mark.parametrize(
    "style", [ColwiseParallel(), ColwiseParallel(multiple_of=16, fused_sizes=(4, 2, 2), replicate_kv_heads=True)]
)
def test_beside_a_column_wise_layer_b_is_split_as_the_layer_is(style: ColwiseParallel) -> None:
    found = adapter_styles(style)
    assert found.a == NoParallel()
    assert found.b == style


def test_an_input_that_arrives_cut_stays_cut_until_it_is_as_narrow_as_the_rank() -> None:
    found = adapter_styles(ColwiseParallel(), sequence_dim=1)
    assert found.a == SequenceParallel(sequence_dim=1)
    assert found.b == ColwiseParallel()


@pytest.mark.parametrize(("output", "gradient"), [(Replicate(), "full"), (Shard(1), "partial")])
def test_beside_a_row_wise_layer_b_follows_the_sum(output: Replicate | Shard, gradient: str) -> None:
    style = RowwiseParallel(output_layouts=output, multiple_of=8)
    found = adapter_styles(style)
    assert found.a == style
    assert found.b == NoParallel(gradient=gradient)  # type: ignore[arg-type]


def test_beside_a_row_wise_layer_of_which_each_rank_keeps_features_b_is_split_by_them() -> None:
    found = adapter_styles(RowwiseParallel(output_layouts=Shard(-1), multiple_of=8))
    assert found.a == RowwiseParallel(multiple_of=8)
    assert found.b == ColwiseParallel()


def test_beside_a_layer_that_every_rank_computes_both_are_replicated() -> None:
    found = adapter_styles(GatheredParameters())
    assert found.a == found.b == NoParallel()
    with pytest.raises(PlanError, match="leave it out of the adapter's target modules"):
        adapter_styles(GatheredParameters(), sequence_dim=1)


def test_beside_latent_keys_b_is_split_and_gathered_as_they_are() -> None:
    found = adapter_styles(MLAKVProjection(rope_dim=8))
    assert found.a == NoParallel()
    assert found.b == MLAKVProjection(rope_dim=8)


@pytest.mark.parametrize("style", [VocabParallelEmbedding(), RowwiseParallel(output_layouts=Partial())])
def test_layers_that_cannot_carry_one_are_refused_with_advice(style: VocabParallelEmbedding | RowwiseParallel) -> None:
    with pytest.raises(PlanError, match="leave it out of the adapter's target modules"):
        adapter_styles(style)
