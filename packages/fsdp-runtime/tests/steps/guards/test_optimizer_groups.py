"""Fused and ``foreach`` steps of a model with plain parameters next to sharded ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import rl_logprobs
from fsdp_runtime import parallelize
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from tp_plans import plan_for


def _model() -> nn.Module:
    """A model whose final norm is in no plan."""
    plan = plan_for("Qwen3ForCausalLM").override({"model.norm": None})
    return parallelize(tiny_model("Qwen3ForCausalLM"), mesh_for({"tp": 2}), plan=plan, logits="full")


def _stepped(options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[int]]:
    model = _model()
    kinds = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    assert kinds == {True, False}
    bias = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": bias, "weight_decay": 0.5}], lr=1e-2, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step)
    for _ in range(2):
        model(**tiny_inputs(model, batch=2, length=7), use_cache=False).logits.square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    sizes = [len(group["params"]) for group in optimizer.state_dict()["param_groups"]]
    full = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()}
    return full, sizes


def _differences() -> list[str]:
    wanted, sizes = _stepped({})
    wrong = []
    for options in ({"foreach": True}, {"fused": True}):
        found, found_sizes = _stepped(options)
        wrong += [n for n in wanted if not torch.allclose(found[n], wanted[n], rtol=0, atol=1e-14)]
        wrong += [] if found_sizes == sizes else [f"groups of {found_sizes} parameters, not of {sizes}"]
    return wrong


def test_plain_and_sharded_parameters_step_together(two_ranks: RankPool) -> None:
    assert two_ranks.run(_differences) == [[], []]


def _with_a_parameter_of_the_users(make: Any) -> list[float]:
    """Errors of a temperature outside of the model, of its gradient's norm and of the weights, after two steps."""
    plain, found = tiny_model("Qwen3ForCausalLM"), []
    sharded = parallelize(copy.deepcopy(plain), mesh_for({"tp": 2}))
    tokens = tiny_inputs(plain, batch=2, length=7)["input_ids"]
    for model in (plain, sharded):
        temperature = nn.Parameter(torch.full((1,), 1.3, dtype=torch.float64))
        optimizer = make([*model.parameters(), temperature])
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                logits = model(tokens, use_cache=False).logits / temperature
                rl_logprobs.token_logprobs(logits, tokens, shift=True).mean().backward()
            norm = rl_logprobs.clip_grad_norm_([*model.parameters(), temperature], 0.5)
            optimizer.step()
        weight = model.get_parameter("lm_head.weight")
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        found.append((temperature.detach(), norm, whole.detach()))
    return [float((one - other).abs().max()) for one, other in zip(*found, strict=True)]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=lambda make: make.__name__)
def test_a_parameter_of_the_users_steps_by_its_gradient_of_all_ranks(two_ranks: RankPool, make: Any) -> None:
    for errors in two_ranks.run(_with_a_parameter_of_the_users, make):
        assert max(errors) < 1e-8


def _restored() -> list[int]:
    optimizer = torch.optim.AdamW(_model().parameters(), foreach=True)
    groups = optimizer.param_groups

    def fail() -> float:
        raise KeyError("in the loss")

    with pytest.raises(KeyError):
        optimizer.step(fail)
    optimizer.step()
    return [int(optimizer.param_groups is groups), len(groups)]


def test_the_groups_are_the_users_again_after_a_step_that_raised(two_ranks: RankPool) -> None:
    assert two_ranks.run(_restored) == [[1, 1]] * 2


class _Counting(torch.optim.Optimizer):
    """An optimizer that counts its steps in the group, as schedule-free ones do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"foreach": True, "k": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1


def _steps_counted() -> list[int]:
    optimizer = _Counting(_model().parameters())
    optimizer.step()
    optimizer.step()
    return [group["k"] for group in optimizer.param_groups]


def test_other_optimizers_keep_what_they_write_to_their_groups(two_ranks: RankPool) -> None:
    assert two_ranks.run(_steps_counted) == [[2]] * 2
