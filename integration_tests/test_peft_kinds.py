"""What peft adds to a model, of every kind that a plan takes: outputs and gradients of one process, on ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import forward_with_lm_head, parallelize
from harness.float64 import compute_in_float64
from harness.models import VOCAB, jitter, tiny_config, tiny_model
from harness.parity import gradient_errors, largest, mesh_for
from harness.ranks import RankPool
from rl_logprobs import linear_token_logprobs, token_logprobs

BOUND = 1e-9
QV = ["q_proj", "v_proj"]
NORMS = ["input_layernorm", "q_norm", "norm"]

#: Configs of peft by name, with the class of the model and changes to its config.
KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "head": ("Qwen3ForCausalLM", {}, {"target_modules": ["q_proj", "lm_head"]}),
    "tied head": ("Qwen3ForCausalLM", {"tied": True}, {"target_modules": ["o_proj", "lm_head"]}),
    "rank-stabilised head": ("Qwen3ForCausalLM", {}, {"target_modules": ["lm_head"], "use_rslora": True}),
    "saved head": ("Qwen3ForCausalLM", {}, {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "saved tied head": ("Qwen3ForCausalLM", {"tied": True}, {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "saved ends": ("Qwen3ForCausalLM", {}, {"target_modules": QV, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved norms": ("Qwen3ForCausalLM", {}, {"target_modules": QV, "modules_to_save": NORMS}),
    "saved layers": ("Qwen3ForCausalLM", {}, {"target_modules": QV, "modules_to_save": ["mlp", "k_proj", "o_proj"]}),
    "saved blocks": ("Qwen3ForCausalLM", {}, {"target_modules": QV, "modules_to_save": ["layers.1"]}),
    "LN tuning": ("Qwen3ForCausalLM", {}, peft.LNTuningConfig(target_modules=NORMS)),
    "biases": ("Qwen2ForCausalLM", {}, {"target_modules": QV, "bias": "all"}),
    "biases of adapters": ("LlamaForCausalLM", {}, {"target_modules": [*QV, "o_proj", "lm_head"], "lora_bias": True}),
    "experts": (
        "Qwen3MoeForCausalLM",
        {},
        {"target_modules": QV, "target_parameters": ["experts.gate_up_proj"], "modules_to_save": ["gate", "norm"]},
    ),
    "reward": ("Qwen3ForSequenceClassification", {}, {"target_modules": QV, "task_type": "SEQ_CLS"}),
    "tokens": ("LlamaForTokenClassification", {}, {"target_modules": QV, "task_type": "TOKEN_CLS"}),
    "answers": ("LlamaForQuestionAnswering", {}, {"target_modules": QV, "task_type": "QUESTION_ANS"}),
    "reward of a mixture": ("Qwen3MoeForSequenceClassification", {}, {"target_modules": QV, "task_type": "SEQ_CLS"}),
}


def adapted(kind: str) -> Any:
    """Return a model of one kind, no value of it zero or initial."""
    architecture, changes, settings = KINDS[kind]
    torch.manual_seed(0)
    if architecture.endswith("CausalLM"):
        model = tiny_model(architecture, **changes)
    else:
        config = tiny_config(architecture.partition("For")[0] + "ForCausalLM")
        config.num_labels, config._experts_implementation = 2 if "Question" in architecture else 3, "eager"
        model = getattr(transformers, architecture)(config)
    config = settings if isinstance(settings, peft.PeftConfig) else peft.LoraConfig(r=3, lora_alpha=7, **settings)
    found: Any = peft.get_peft_model(model, config, autocast_adapter_dtype=False).double().eval()
    jitter(found)
    return found


PAD = 0
IDS = torch.randint(3, 130, (4, 7), generator=torch.Generator().manual_seed(1))
IDS[0, 5:] = PAD


def _plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _scores(model: nn.Module, ids: Tensor, *, hidden: bool) -> Tensor:
    """Log-probabilities from logits or from hidden states, or a task's scores."""
    if hidden:
        targets = ids.roll(-1, 1)
        found = forward_with_lm_head(
            model,
            lambda states, head: linear_token_logprobs(states, head.weight, targets, bias=head.bias),
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            use_cache=False,
        )
        return _plain(found)
    output = model(input_ids=ids, use_cache=False, attention_mask=(ids != PAD).long())
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits]).transpose(0, 1)
    if output.logits.shape[-1] == VOCAB:
        return token_logprobs(output.logits, ids.roll(-1, 1))
    return _plain(output.logits)


def _backward(model: nn.Module, ids: Tensor, own: slice, ranks: int, *, hidden: bool) -> Tensor:
    scores = _scores(model, ids[own], hidden=hidden)
    weights = torch.randn(len(ids), *scores.shape[1:], generator=torch.Generator().manual_seed(2), dtype=scores.dtype)
    (scores * weights[own]).sum().mul(ranks).backward()
    return scores.detach()


def errors_of(kind: str, axes: Mapping[str, int], options: Mapping[str, Any], *, hidden: bool) -> dict[str, float]:
    """Return what is off by more than rounding on this rank."""
    reference = adapted(kind)
    candidate = copy.deepcopy(reference)
    mesh = mesh_for(axes)
    with compute_in_float64():
        wanted = _backward(reference, IDS, slice(None), 1, hidden=False)
        candidate = parallelize(candidate, mesh, **options)
        ranks = axes.get("dp_shard", 1)
        share = len(IDS) // ranks
        first = share * (mesh["dp_shard"].get_local_rank() if "dp_shard" in axes else 0)
        own = slice(first, first + share)
        found = _backward(candidate, IDS, own, ranks, hidden=hidden)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    trained = [name for name, gradient in expected.items() if gradient is not None]
    errors = gradient_errors(expected, candidate) | {"scores": largest(found - wanted[own])}
    assert trained
    return {name: error for name, error in errors.items() if not error <= BOUND}


def _wrong(axes: Mapping[str, int], options: Mapping[str, Any], kinds: list[str], *, hidden: bool) -> dict[str, Any]:
    """Return what is off by kind; with ``hidden`` of language models under a loss from hidden states."""
    found = {}
    for kind in kinds:
        from_hidden = hidden and KINDS[kind][0].endswith("CausalLM")
        found[kind] = errors_of(kind, axes, options, hidden=from_hidden)
    return {kind: errors for kind, errors in found.items() if errors}


def test_every_kind_computes_what_one_process_does(two_ranks: RankPool) -> None:
    options = {"sequence_parallel": True}
    assert two_ranks.run(_wrong, {"tp": 2}, options, list(KINDS), hidden=True) == [{}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=str)
def test_every_kind_does_from_logits(two_ranks: RankPool, options: dict[str, Any]) -> None:
    assert two_ranks.run(_wrong, {"tp": 2}, options, list(KINDS), hidden=False) == [{}] * 2


@pytest.mark.parametrize(
    "kinds", [["head", "saved norms", "reward"], pytest.param(list(KINDS), marks=pytest.mark.slow)], ids=len
)
def test_kinds_do_under_fsdp_too(four_ranks: RankPool, kinds: list[str]) -> None:
    options = {"sequence_parallel": True, "activation_checkpointing": "block"}
    assert four_ranks.run(_wrong, {"dp_shard": 2, "tp": 2}, options, kinds, hidden=True) == [{}] * 4
