"""Plain parameters around a parallelized model: their gradients are equal on every rank, or the step is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

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
            assert "2 of 2 plain parameters of this SGD (first of shape (1, 64))" in message
            assert "ranks of dp_shard" in message


@pytest.mark.parametrize(("axes", "reduces"), [({"dp_shard": 2}, True), ({"tp": 2}, False)])
def test_a_head_with_equal_gradients_on_every_rank_is_trained(
    two_ranks: RankPool, axes: dict[str, int], reduces: bool
) -> None:
    assert two_ranks.run(_train_head, axes, reduces, 0) == [["", "", ""]] * 2


def _drawn_head(axes: dict[str, int], is_inside: bool, alone: bool, seed_by_rank: bool) -> list[str]:
    """Step with a head that is drawn later, with equal gradients; and with a second one, added to the optimizer."""
    model: Any = parallelize(tiny_model("Qwen3ForCausalLM"), mesh_for(axes))
    said = []
    optimizer: Any = None
    for number in range(2):
        torch.manual_seed(7 + number + seed_by_rank * dist.get_rank())
        head = nn.Linear(64, 1, dtype=torch.float64)
        if is_inside:
            model.add_module(f"value_head_{number}", head)
        if optimizer is None:
            others = [] if alone else [each for each in model.parameters() if isinstance(each, DTensor)]
            optimizer = torch.optim.SGD([*others, *head.parameters()], 0.1)
        else:
            optimizer.add_param_group({"params": [*head.parameters()]})
        for parameter in head.parameters():
            parameter.grad = torch.ones_like(parameter)
        try:
            optimizer.step()
            said.append("")
        except ModelError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "around"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}], ids=str)
def test_a_head_that_ranks_drew_differently_is_refused(
    two_ranks: RankPool, axes: dict[str, int], is_inside: bool
) -> None:
    for alone in (True, False) if is_inside else (False,):
        for said in two_ranks.run(_drawn_head, axes, is_inside, alone, True):
            assert "2 of 2 plain parameters of this SGD (first of shape (1, 64)) have different values" in said[0]
            assert "4 of 4 plain parameters" in said[1]
    assert two_ranks.run(_drawn_head, axes, is_inside, False, False) == [["", ""]] * 2


def _second_head(axes: dict[str, int]) -> list[str]:
    """Step with a head that is equal on all ranks, then with one that is not."""
    model: Any = parallelize(tiny_model("Qwen3ForCausalLM"), mesh_for(axes))
    scales = [nn.Parameter(torch.full((), value, dtype=torch.float64)) for value in (1.0, 1.0 + dist.get_rank())]
    optimizer = torch.optim.SGD([*model.parameters(), scales[0]], lr=0.1)
    said = []
    for scale in scales:
        scale.grad = torch.ones_like(scale)
        try:
            optimizer.step()
            said.append("")
        except ModelError as error:
            said.append(str(error))
        if scale is scales[0]:
            optimizer.add_param_group({"params": [scales[1]]})
    return said


def test_a_parameter_that_joins_an_optimizer_later_is_compared(two_ranks: RankPool) -> None:
    for first, second in two_ranks.run(_second_head, {"dp_shard": 2}):
        assert first == ""
        assert "1 of 2 plain parameters" in second
