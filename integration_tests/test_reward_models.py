"""Reward models and critics that start from a language model: outputs and every gradient are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from fsdp_runtime import load_weights, meta_device, parallelize, submesh
from harness.float64 import compute_in_float64
from harness.models import HIDDEN, tiny_model
from harness.parity import gradient_errors, largest, mesh_for
from harness.ranks import RankPool
from rl_logprobs import token_logprobs

BOUND = 1e-9
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 3, 2, 1, 0], [4, 4, 8, 0, 0], [7, 1, 2, 3, 4]])


class ActorCritic(nn.Module):
    """A policy, and a value head on its last hidden states."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.policy = AutoModelForCausalLM.from_config(config)
        self.value_head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 1))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        output = self.policy(ids, output_hidden_states=True, use_cache=False)
        return output.logits, self.value_head(output.hidden_states[-1]).squeeze(-1)


def _build(form: str, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    config = AutoConfig.from_pretrained(folder, num_labels=1, classifier_dropout=0.0)
    with meta_device():
        if form == "reward":
            model, options = AutoModelForSequenceClassification.from_config(config), {"new_modules": {"score": 0.5}}
        elif form == "critic":
            model, options = AutoModelForTokenClassification.from_config(config), {"new_modules": {"score": 0.5}}
        else:
            model, options = ActorCritic(config), {"prefix": "policy", "new_modules": {"value_head": 0.5}}
    return model.double(), options


def _outputs(form: str, model: nn.Module, ids: Tensor) -> tuple[Tensor, ...]:
    if form == "reward":
        return (model(ids, attention_mask=ids.ne(0).long()).logits,)
    if form == "critic":
        return (model(ids).logits,)
    logits, values = model(ids)
    return token_logprobs(logits, ids, shift=True), values


def _run(form: str, model: nn.Module, rows: slice) -> list[Tensor]:
    with compute_in_float64():
        outputs = _outputs(form, model, IDS[rows])
        sum(output.square().sum() for output in outputs).div(len(IDS[rows])).backward()  # type: ignore[union-attr]
    return [output.detach() for output in outputs]


def _errors(form: str, folder: Path, axes: dict[str, int], sequence_parallel: bool) -> float:
    plain, options = _build(form, folder)
    load_weights(plain, folder, training=False, **options)
    expected = _run(form, plain, slice(None))
    model, _ = _build(form, folder)
    mesh = mesh_for(axes)
    parallelize(model, mesh, sequence_parallel=sequence_parallel)
    load_weights(model, folder, training=False, **options)
    dp = submesh(mesh, "dp")
    share = len(IDS) // dp.size()
    rows = slice(share * dp.get_local_rank(), share * (dp.get_local_rank() + 1))
    found = _run(form, model, rows)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())
    outputs = [largest(one - all_of[rows]) for one, all_of in zip(found, expected, strict=True)]
    return max(*outputs, *gradient_errors(gradients, model).values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("language_model")
    tiny_model("Qwen3ForCausalLM").save_pretrained(path)
    return path


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_shard": 2}], ids=str)
@pytest.mark.parametrize("form", ["reward", "critic", "actor-critic"])
def test_reward_forms_on_two_ranks_train_as_one_process(
    two_ranks: RankPool, folder: Path, form: str, axes: dict[str, int]
) -> None:
    assert max(two_ranks.run(_errors, form, folder, axes, "tp" in axes)) < BOUND


@pytest.mark.parametrize("form", ["reward", "critic", "actor-critic"])
def test_reward_forms_on_dp_and_tp_train_as_one_process(four_ranks: RankPool, folder: Path, form: str) -> None:
    assert max(four_ranks.run(_errors, form, folder, {"dp_shard": 2, "tp": 2}, False)) < BOUND
