"""Plain parameters around a parallelized model: their gradients are equal on every rank, or the step is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_runtime import ModelError, parallelize
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool


def _train_head(axes: dict[str, int], reduces: bool, idle_steps: int) -> list[str]:
    """Take three steps of a head outside of the model, on a sample a rank, and return what each said."""
    model = parallelize(tiny_model("Qwen3ForCausalLM"), mesh_for(axes))
    head = nn.Linear(64, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=1e-3)
    sample = tiny_inputs(model, batch=2, length=7)["input_ids"][dist.get_rank() if "dp_shard" in axes else 0 :][:1]
    said = []
    for step in range(3):
        optimizer.zero_grad()
        hidden = model(sample, output_hidden_states=True, use_cache=False).hidden_states[-1]
        (head(hidden).square().mean() * (step >= idle_steps)).backward()
        for parameter in head.parameters() if reduces else ():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        try:
            optimizer.step()
            said.append("")
        except ModelError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("idle_steps", [0, 1])
def test_a_head_around_a_model_whose_gradients_are_those_of_one_rank_is_refused(
    two_ranks: RankPool, idle_steps: int
) -> None:
    for said in two_ranks.run(_train_head, {"dp_shard": 2}, False, idle_steps):
        assert said[:idle_steps] == [""] * idle_steps
        for message in said[idle_steps:]:
            assert "2 of 2 parameters of this SGD that are no shards (first of shape (1, 64))" in message
            assert "ranks of dp_shard" in message


@pytest.mark.parametrize(("axes", "reduces"), [({"dp_shard": 2}, True), ({"tp": 2}, False)])
def test_a_head_with_equal_gradients_on_every_rank_is_trained(
    two_ranks: RankPool, axes: dict[str, int], reduces: bool
) -> None:
    assert two_ranks.run(_train_head, axes, reduces, 0) == [["", "", ""]] * 2
