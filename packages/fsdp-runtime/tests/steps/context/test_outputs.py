"""Losses, kept logits and scores over ``cp`` are those of full rows, with every gradient, on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import OptionError, forward_with_lm_head, parallelize, sequence_layout
from fsdp_runtime.steps.context.exchange import sum_over_ranks
from harness.models import tiny_inputs, tiny_model
from harness.parity import gradient_errors, mesh_for
from harness.ranks import RankPool

LENGTH = 16
#: transformers computes losses of tokens in float32.
LOSS_BOUND, BOUND = 2e-6, 1e-10
_HALF = [1.0, 2.0, 3.0, 4.0]
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 10,
        "short_factor": [1.0] * 4,
        "long_factor": _HALF,
    },
}


def _model(kind: str) -> nn.Module:
    if kind in ROPES:
        rope = {**ROPES[kind], "rope_theta": 1e4}
        return tiny_model("LlamaForCausalLM", max_position_embeddings=8, head_dim=8, rope_parameters=rope)
    if not kind.endswith("Classification"):
        return tiny_model(kind)
    config = copy.deepcopy(tiny_model(kind.partition("For")[0] + "ForCausalLM").config)
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).double().eval()  # type: ignore[no-any-return]


def _batch(model: nn.Module, asked: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what has an entry for each token, and what has not."""
    ids = tiny_inputs(model, batch=3, length=LENGTH)["input_ids"].clamp(3, 100)
    if not type(model).__name__.endswith("SequenceClassification"):
        classes = ids % 3 if type(model).__name__.endswith("TokenClassification") else ids
        labels = classes.masked_fill(torch.arange(LENGTH) < torch.tensor([[3], [0], [9]]), -100)
        return {"input_ids": ids, **({} if "logits_to_keep" in asked else {"labels": labels})}, asked
    ids[0, 11:], ids[1, :4] = 0, 0
    labels = {"labels": torch.tensor([0, 2, 1])} if type(model).__name__.endswith("SequenceClassification") else {}
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}, {**asked, **labels}


def _loss(output: Any) -> Tensor:
    if output.loss is not None:
        return output.loss  # type: ignore[no-any-return]
    logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits
    weights = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(3))
    return (logits * weights).sum()


def _errors(kind: str, axes: dict[str, int], options: dict[str, Any], asked: dict[str, Any]) -> tuple[float, float]:
    """The errors of a loss and of all gradients."""
    reference = _model(kind)
    of_tokens, others = _batch(reference, asked)
    wanted = _loss(reference(**of_tokens, **others, use_cache=False))
    wanted.backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    mesh = mesh_for(axes)
    model = parallelize(copy.deepcopy(reference), mesh, **options)
    model.zero_grad()
    layout = sequence_layout(mesh, LENGTH)
    for _ in range(2):  # the model's own loss function is back after a forward
        model.zero_grad()
        found = _loss(model(**layout.shard_batch(of_tokens), **others, use_cache=False))
        found.backward()
    assert not hasattr(model, "_loss_function")
    return abs(float(found.detach() - wanted.detach())), max(gradient_errors(gradients, model).values())


SP = {"sequence_parallel": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "labels": ("LlamaForCausalLM", {}, {}),
    "labels of a mixture": ("Qwen3MoeForCausalLM", {}, {"output_router_logits": True}),
    "labels and a number of items": ("LlamaForCausalLM", {}, {"num_items_in_batch": 7}),
    "a number of logits": ("LlamaForCausalLM", {}, {"logits_to_keep": 3}),
    "more logits than tokens": ("LlamaForCausalLM", {}, {"logits_to_keep": 40}),
    "places of logits": ("Qwen3ForCausalLM", {}, {"logits_to_keep": torch.tensor([0, 14, -11])}),
    "scores": ("LlamaForSequenceClassification", {}, {}),
    "scores by rings": ("Qwen3ForSequenceClassification", {"context_parallel": "ring"}, {}),
    "labels of tokens": ("LlamaForTokenClassification", {}, {}),
    "dynamic frequencies": ("dynamic", {}, {}),
    "long frequencies": ("longrope", {}, {}),
}
ON_FOUR = ("labels", "a number of logits", "places of logits", "scores", "dynamic frequencies")


@pytest.mark.parametrize("case", CASES)
def test_outputs_of_full_rows_match_one_process(two_ranks: RankPool, case: str) -> None:
    kind, options, asked = CASES[case]
    for loss, gradient in two_ranks.run(_errors, kind, {"cp": 2}, options, asked):
        assert loss < LOSS_BOUND
        assert gradient < BOUND


@pytest.mark.parametrize("axes", [{"cp": 2, "tp": 2}, {"dp_shard": 1, "cp": 4}], ids=str)
@pytest.mark.parametrize("case", ON_FOUR)
def test_outputs_of_full_rows_match_one_process_beside_other_axes(
    four_ranks: RankPool, case: str, axes: dict[str, int]
) -> None:
    kind, options, asked = CASES[case]
    more = SP if "tp" in axes else {}
    for loss, gradient in four_ranks.run(_errors, kind, axes, {**options, **more}, asked):
        assert loss < LOSS_BOUND
        assert gradient < BOUND


def _kept_in_a_loss_from_hidden_states() -> str:
    mesh = mesh_for({"cp": 2})
    model = parallelize(_model("LlamaForCausalLM"), mesh)
    ids = tiny_inputs(model, batch=2, length=LENGTH)["input_ids"]
    batch = sequence_layout(mesh, LENGTH).shard_batch({"input_ids": ids})
    with pytest.raises(OptionError) as failure:
        forward_with_lm_head(model, lambda hidden, head: hidden.sum(), **batch, logits_to_keep=3)
    return str(failure.value)


def test_losses_from_hidden_states_take_no_kept_logits(two_ranks: RankPool) -> None:
    assert all("logits_to_keep" in message for message in two_ranks.run(_kept_in_a_loss_from_hidden_states))


def _sum_with_an_infinity() -> tuple[list[float], list[float]]:
    own = torch.tensor([float("-inf"), 2.0], requires_grad=True)
    total = sum_over_ranks(own, None)
    (total * torch.tensor([3.0, 5.0])).sum().backward()
    assert own.grad is not None
    return total.tolist(), own.grad.tolist()


def test_a_sum_over_ranks_keeps_infinities_and_each_rank_its_own_gradient(two_ranks: RankPool) -> None:
    assert two_ranks.run(_sum_with_an_infinity) == [([float("-inf"), 4.0], [3.0, 5.0])] * 2
