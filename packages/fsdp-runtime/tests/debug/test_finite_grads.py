"""A gradient that is not finite on any rank is named on all of them."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_runtime import GradientError, MeshSpec, assert_finite_gradients, parallelize
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool

NORM = "model.layers.1.input_layernorm.weight"


def _told(planted: list[dict[int, float]]) -> list[str]:
    """What the check says once two elements of a norm's gradient on each of some ranks have another value."""
    model = tiny_model("Qwen3ForCausalLM")
    model = parallelize(model, MeshSpec(dp_shard=2, tp=2).build(device_type="cpu"), sequence_parallel=True)
    model(**tiny_inputs(model, batch=1, length=7)).logits.to_local().square().sum().backward()
    gradient = model.get_parameter(NORM).grad.to_local().view(-1)[:2]
    computed, found = gradient.clone(), []
    for values in planted:
        gradient.fill_(values[dist.get_rank()]) if dist.get_rank() in values else gradient.copy_(computed)
        try:
            assert_finite_gradients(model)
        except GradientError as error:
            found.append(str(error))
        else:
            found.append("finite")
    return found


def test_nonfinite_values_of_one_rank_are_named_on_every_rank_and_finite_ones_pass(four_ranks: RankPool) -> None:
    for finite, *told in four_ranks.run(_told, [{}, {2: math.nan}, {2: math.inf}, {2: -math.inf}]):
        assert finite == "finite"
        for each in told:
            assert each.startswith("1 parameters have gradients that are not finite")
            assert f"  {NORM} (rank 2: 2)" in each


def test_infinities_of_opposite_sign_do_not_cancel(four_ranks: RankPool) -> None:
    for (told,) in four_ranks.run(_told, [{0: math.inf, 3: -math.inf}]):
        assert f"  {NORM} (rank 0: 2, rank 3: 2)" in told


def test_a_plain_model_is_checked_without_ranks_and_missing_gradients_are_skipped() -> None:
    model = nn.Linear(2, 2)
    assert_finite_gradients(model)
    model.weight.grad = model.weight.detach() * math.nan
    with pytest.raises(GradientError, match=r"weight \(rank 0: 4\)"):
        assert_finite_gradients(model)
