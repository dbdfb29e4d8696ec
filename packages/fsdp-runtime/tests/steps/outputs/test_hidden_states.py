"""``logits_to_keep`` under sequence parallelism: the logits and gradients of one process, for numbers and indices."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import forward_with_lm_head, parallelize, sequence_layout
from harness.models import tiny_model
from harness.parity import gradient_errors, mesh_for
from harness.ranks import RankPool
from rl_logprobs import linear_token_logprobs, token_logprobs

IDS = torch.randint(3, 130, (2, 7), generator=torch.Generator().manual_seed(1))
KEPT: dict[str, int | Tensor] = {
    "all": 0,
    "the last three": 3,
    "indices": torch.tensor([1, 5, 6]),
    "repeated": torch.tensor([6, 0, 0]),
    "a mask": torch.tensor([True, False, True, False, False, True, True]),
}


def _score(model: nn.Module, kept: int | Tensor) -> Tensor:
    logits = model(input_ids=IDS, use_cache=False, logits_to_keep=kept).logits
    scores = token_logprobs(logits, torch.full(logits.shape[:2], 7))
    (scores * torch.arange(1, scores.numel() + 1).view(scores.shape)).sum().backward()
    return scores.detach()


def _score_hidden(model: nn.Module, kept: int | Tensor) -> Tensor:
    def score(states: Tensor, head: Any) -> Tensor:
        return linear_token_logprobs(states, head.weight, torch.full(states.shape[:2], 7), bias=head.bias)

    scores = forward_with_lm_head(model, score, input_ids=IDS, use_cache=False, logits_to_keep=kept)
    scores = scores.full_tensor() if isinstance(scores, DTensor) else scores
    (scores * torch.arange(1, scores.numel() + 1).view(scores.shape)).sum().backward()
    return scores.detach()


def _errors(options: dict[str, Any], *, adapted: bool) -> dict[str, dict[str, float]]:
    found = {}
    for name, kept in KEPT.items():
        reference: Any = tiny_model("Qwen3ForCausalLM")
        if adapted:
            config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
            reference = peft.get_peft_model(reference, config).double().eval()
        model = parallelize(copy.deepcopy(reference), mesh_for({"tp": 2}), **options)
        error = (_score(reference, kept) - (_score_hidden if adapted else _score)(model, kept)).abs().max().item()
        expected = {each: parameter.grad for each, parameter in reference.named_parameters()}
        errors = gradient_errors(expected, model) | {"scores": error}
        found[name] = {each: error for each, error in errors.items() if not error <= 1e-4}
    return {name: errors for name, errors in found.items() if errors}


@pytest.mark.parametrize("adapted", [False, True], ids=["from logits", "adapted, from hidden states"])
def test_kept_logits_are_those_of_one_process(two_ranks: RankPool, adapted: bool) -> None:
    options = {"sequence_parallel": True, "activation_checkpointing": "block"}
    assert two_ranks.run(_errors, options, adapted=adapted) == [{}] * 2


def _over_cp() -> None:
    mesh = mesh_for({"cp": 2})
    model: Any = tiny_model("Qwen3ForCausalLM")
    ids = torch.randint(3, 130, (2, 8), generator=torch.Generator().manual_seed(1))
    alone = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    parallelize(model, mesh)
    layout = sequence_layout(mesh, ids.shape[1])
    batch = layout.shard_batch({"input_ids": ids})
    sharded = model(**batch, use_cache=False, output_hidden_states=True).hidden_states
    for ours, theirs in zip(sharded, alone, strict=True):
        torch.testing.assert_close(ours, layout.shard(theirs), rtol=0, atol=1e-6)


def test_hidden_states_over_cp_are_those_of_the_ranks_tokens(two_ranks: RankPool) -> None:
    two_ranks.run(_over_cp)
