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
def test_adapter_styles_split_b_as_its_column_wise_layer(style: ColwiseParallel) -> None:
    found = adapter_styles(style)
    assert found.a == NoParallel()
    assert found.b == style


def test_adapter_styles_keep_a_sharded_input_sharded_in_a() -> None:
    found = adapter_styles(ColwiseParallel(), sequence_dim=1)
    assert found.a == SequenceParallel(sequence_dim=1)
    assert found.b == ColwiseParallel()


@pytest.mark.parametrize(("output", "gradient"), [(Replicate(), "full"), (Shard(1), "partial")])
def test_adapter_styles_put_b_after_the_sum_of_a_row_wise_layer(output: Replicate | Shard, gradient: str) -> None:
    style = RowwiseParallel(output_layouts=output, multiple_of=8)
    found = adapter_styles(style)
    assert found.a == style
    assert found.b == NoParallel(gradient=gradient)  # type: ignore[arg-type]


def test_adapter_styles_split_b_beside_a_row_wise_layer_with_sharded_output() -> None:
    found = adapter_styles(RowwiseParallel(output_layouts=Shard(-1), multiple_of=8))
    assert found.a == RowwiseParallel(multiple_of=8)
    assert found.b == ColwiseParallel()


def test_adapter_styles_replicate_both_factors_of_a_replicated_layer() -> None:
    found = adapter_styles(GatheredParameters())
    assert found.a == found.b == NoParallel()
    with pytest.raises(PlanError, match="leave it out of the adapter's target modules"):
        adapter_styles(GatheredParameters(), sequence_dim=1)


def test_adapter_styles_split_and_gather_b_as_latent_keys() -> None:
    found = adapter_styles(MLAKVProjection(rope_dim=8))
    assert found.a == NoParallel()
    assert found.b == MLAKVProjection(rope_dim=8)


@pytest.mark.parametrize("style", [VocabParallelEmbedding(), RowwiseParallel(output_layouts=Partial())])
def test_adapter_styles_refuse_other_layers_with_advice(style: VocabParallelEmbedding | RowwiseParallel) -> None:
    with pytest.raises(PlanError, match="leave it out of the adapter's target modules"):
        adapter_styles(style)
