"""A gradient that is not a number, on whatever rank, is named on all of them."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_runtime import GradientError, MeshSpec, assert_finite_gradients, parallelize
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool

NORM = "model.layers.1.input_layernorm.weight"


def _told(values: dict[int, float]) -> str:
    """What the check says once an element of a norm's gradient on each of some ranks has another value."""
    model = tiny_model("Qwen3ForCausalLM")
    model = parallelize(model, MeshSpec(dp_shard=2, tp=2).build(device_type="cpu"), sequence_parallel=True)
    model(**tiny_inputs(model, batch=1, length=7)).logits.to_local().square().sum().backward()
    if dist.get_rank() in values:
        model.get_parameter(NORM).grad.to_local().view(-1)[:2] = values[dist.get_rank()]
    try:
        assert_finite_gradients(model)
    except GradientError as error:
        return str(error)
    return "finite"


def test_sound_gradients_pass(four_ranks: RankPool) -> None:
    assert four_ranks.run(_told, {}) == ["finite"] * 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_rank_s_values_are_told_on_every_rank(four_ranks: RankPool, value: float) -> None:
    for told in four_ranks.run(_told, {2: value}):
        assert told.startswith("1 parameters have gradients that are not finite")
        assert f"  {NORM} (rank 2: 2)" in told


def test_infinities_of_opposite_sign_do_not_cancel(four_ranks: RankPool) -> None:
    for told in four_ranks.run(_told, {0: math.inf, 3: -math.inf}):
        assert f"  {NORM} (rank 0: 2, rank 3: 2)" in told


def test_a_plain_model_is_checked_alone_and_missing_gradients_are_none_of_its_business() -> None:
    model = nn.Linear(2, 2)
    assert_finite_gradients(model)
    model.weight.grad = model.weight.detach() * math.nan
    with pytest.raises(GradientError, match=r"weight \(rank 0: 4\)"):
        assert_finite_gradients(model)
