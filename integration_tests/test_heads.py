"""Heads on ranks: classifiers, question answering, trunks, encoders, and a policy with a value head of one's own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers.models.bert.modeling_bert import BertLayer

from coverage.heads import HeadRow, head_model, head_rows
from coverage.heads_measure import BOUND, measure_head
from fsdp_runtime import OptionError, load_weights, parallelize, save_weights, stream_weights
from fsdp_runtime.steps.tensor.lora import resolve_adapted_plan
from harness.float64 import compute_in_float64
from harness.models import HIDDEN, VOCAB, tiny_model
from harness.parity import gradient_errors, largest, mesh_for, padding_mask
from harness.ranks import RankPool
from rl_logprobs import token_logprobs
from tp_plans import (
    CapabilityError,
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    UnknownArchitectureError,
    VocabParallelEmbedding,
    check,
    plan_for,
)
from tp_plans.infer import suggest
from tp_plans.styles import ColwiseEmbedding, GatheredParameters

#: Model type, head and mode: each kind of head, and each way in which hidden states reach one.
CASES = [
    ("qwen3", "sequence classification", "SP"),  # three labels, which do not divide; the last token of each row
    ("qwen3", "trunk", "SP"),  # hidden states for the caller
    ("eurobert", "sequence classification", "SP"),  # a head of several layers, on the first token; two labels
    ("t5", "seq2seq", "SP"),  # two streams of tokens, tied tables of three modules, relative position biases
    ("camembert", "masked", "SP"),  # layers of a block in modules apart, a head that is defined before the trunk
]
#: Further cases of the slow runs.
OTHERS = [
    ("gemma3_text", "reward", "TP"),
    ("llama", "question answering", "SP"),  # a trunk of another name
    ("t5gemma", "seq2seq", "SP"),  # two streams of tokens
    ("qwen3", "token classification", "SP"),
    ("gpt2", "sequence classification", "SP"),
    ("deepseek_v3", "token classification", "SP"),
    ("jamba", "reward", "SP"),
    ("gpt_oss", "trunk", "SP"),
    ("ultrabert", "masked", "SP"),
    ("esmc", "masked", "SP"),
    ("neomme", "masked", "SP"),  # a norm of the embeddings before the blocks
    ("bert", "question answering", "SP"),
    ("bart", "seq2seq", "SP"),
    ("bart", "sequence classification", "TP"),
    ("t5", "question answering", "SP"),
]


#: Labels other than those of the coverage page: as many as ranks.
LABELS = {"eurobert": 2}


def _row(model_type: str, head: str) -> HeadRow:
    found = next(row for row in head_rows() if (row.model_type, row.head) == (model_type, head))
    return replace(found, labels=LABELS.get(model_type))


def measured(cases: list[tuple[str, str, str]]) -> list[dict[str, float]]:
    """Return what is off by more than rounding in each case."""
    found = [measure_head(_row(model_type, head), mode, tp=2) for model_type, head, mode in cases]
    return [{name: error for name, error in errors.items() if not error <= BOUND} for errors in found]


def test_every_kind_of_head_computes_what_one_process_does(two_ranks: RankPool) -> None:
    for wrong in two_ranks.run(measured, CASES):
        assert dict(zip(CASES, wrong, strict=True)) == {case: {} for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=", ".join)
def test_further_heads_compute_what_one_process_does(two_ranks: RankPool, case: tuple[str, str, str]) -> None:
    assert two_ranks.run(measured, [case]) == [[{}]] * 2


# Planted errors


def _summed_once_more(value: Any, mesh: Any) -> Any:
    """Gather in the way that sums the ranks' gradients, each of which is full already."""
    return value.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _other_ranks_tokens(value: Any, mesh: Any) -> Any:
    """Gather the tokens in another order."""
    full = value.redistribute(placements=[Replicate()]).to_local()
    return full.roll(value.to_local().shape[1], dims=1)


#: Fault to the function of ``tp_plans.torch_styles.replicated`` that stands in for, and what stands in.
FAULTS: dict[str, tuple[str, Any]] = {
    "a gradient that is not summed": (
        "local_parts",
        lambda tensors, is_partial: [each.to_local() for each in tensors],
    ),
    "a gradient that is summed twice": ("plain_full_tensor", _summed_once_more),
    "tokens of another rank": ("plain_full_tensor", _other_ranks_tokens),
}


def planted() -> dict[str, dict[str, float]]:
    """Return what is off under each fault, for a head that pools the hidden states after a norm."""
    from tp_plans.torch_styles import replicated

    found = {}
    for fault, (name, stand_in) in FAULTS.items():
        with mock.patch.object(replicated, name, stand_in):
            (found[fault],) = measured([("eurobert", "sequence classification", "SP")])
    return found


def test_planted_errors_are_found_on_every_rank(two_ranks: RankPool) -> None:
    for found in two_ranks.run(planted):
        assert [fault for fault, wrong in found.items() if not wrong] == []


# A policy and a value head on one trunk


class ActorCritic(nn.Module):
    """A language model of transformers, and a value head of several layers on hidden states of two depths."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy
        self.value_head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        found = self.policy(input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False)
        last, inner = found.hidden_states[-1], found.hidden_states[1]  # the latter is sharded on the way to its block
        return found.logits, self.value_head(last + inner).squeeze(-1)


#: Adapters around the outer module.
ADAPTERS = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def _loss(model: nn.Module, ids: Tensor, mask: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of a policy-gradient loss and a value loss, and the values."""
    logits, values = model(ids, mask)
    logprobs = token_logprobs(logits[:, :-1], ids[:, 1:])
    kept = mask[:, 1:]
    policy = -(logprobs * (returns[:, 1:] - values.detach()[:, 1:]) * kept).sum()
    return policy + 0.5 * ((values - returns).square() * mask).sum(), values


def actor_critic(folder: str) -> tuple[list[str], set[str], bool]:
    """Return the faults on this rank, the names that are streamed, and whether saved weights load as they were."""
    torch.manual_seed(0)
    single = ActorCritic(tiny_model("Qwen3ForCausalLM")).double()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (4, 7), generator=generator)
    mask = padding_mask(ids, "right")
    returns = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    mesh = mesh_for({"dp_shard": 2, "tp": 2})
    rank = mesh["dp_shard"].get_local_rank()
    own = slice(2 * rank, 2 * rank + 2)
    faults = []
    adapted = peft.get_peft_model(copy.deepcopy(single), ADAPTERS, autocast_adapter_dtype=False).double()
    adapted.base_model.model.value_head.requires_grad_(True)
    sequence_parallel = {"sequence_parallel": True, "activation_checkpointing": "block"}
    with compute_in_float64():
        for reference, options in ((adapted, sequence_parallel), (single, {}), (single, sequence_parallel)):
            reference.zero_grad()
            loss, values = _loss(reference, ids, mask, returns)
            loss.backward()
            gradients = {path: parameter.grad for path, parameter in reference.named_parameters()}
            model = parallelize(copy.deepcopy(reference), mesh, **options)
            model.zero_grad()
            loss, found = _loss(model, ids[own], mask[own], returns[own])
            if isinstance(found, DTensor) or largest(found - values[own]) > BOUND:
                faults.append(f"{type(reference).__name__}, {options}: values")
            (2 * loss).backward()  # FSDP2 takes the mean
            errors = gradient_errors(gradients, model)
            kind = f"{type(reference).__name__}, {options}"
            faults += [f"{kind}: {path} off by {error:.1e}" for path, error in errors.items() if not error <= BOUND]
    names = {name for name, _ in stream_weights(model)}
    save_weights(model, folder)
    before = {name: tensor.clone() for name, tensor in stream_weights(model)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_weights(model, folder)
    same = all(torch.equal(tensor, before[name]) for name, tensor in stream_weights(model))
    return faults, names, same


def test_a_policy_with_a_value_head_trains_as_in_one_process_and_is_saved(four_ranks: RankPool, tmp_path: Any) -> None:
    for faults, names, same in four_ranks.run(actor_critic, str(tmp_path)):
        assert faults == []
        assert {"policy.lm_head.weight", "value_head.3.weight", "value_head.0.bias"} <= names
        assert same


def test_the_plan_around_a_model_is_that_of_the_model_and_gathers_for_the_value_head() -> None:
    model = ActorCritic(tiny_model("Qwen3ForCausalLM"))
    for sequence_parallel in (False, True):
        inner = plan_for(model.policy, sequence_parallel=sequence_parallel).with_prefix("policy")
        around = plan_for(model, sequence_parallel=sequence_parallel)
        changed = {pattern for pattern in {*inner, *around} if inner.get(pattern) != around.get(pattern)}
        assert changed == ({"policy.model.norm"} if sequence_parallel else set())
    assert around["policy.model.norm"] == SequenceParallel(full_output=True)


def test_both_streams_of_an_encoder_with_a_decoder_are_split() -> None:
    model = head_model(_row("t5", "seq2seq"))
    plan = suggest(model).plan
    for attention in ("encoder.block.*.layer.*.SelfAttention", "decoder.block.*.layer.*.EncDecAttention"):
        assert plan[f"{attention}.q"] == ColwiseParallel(multiple_of=8)
        assert isinstance(plan[f"{attention}.o"], RowwiseParallel)
    for stack in ("encoder", "decoder"):
        bias = plan[f"{stack}.block.*.layer.*.SelfAttention.relative_attention_bias"]
        assert bias == ColwiseEmbedding(output_layouts=Shard(-1))
        assert plan[f"{stack}.embed_tokens"] == plan["shared"] == VocabParallelEmbedding()
    assert not check(plan, model, tp=2).errors


def test_the_layers_of_berts_blocks_are_split_though_they_sit_in_modules_apart() -> None:
    model = head_model(_row("bert", "masked"))
    plan, sequence_parallel = (suggest(model, sequence_parallel=each).plan for each in (False, True))
    block = "bert.encoder.layer.*"
    for name in ("query", "key", "value"):
        assert plan[f"{block}.attention.self.{name}"] == ColwiseParallel(multiple_of=8)
    assert plan[f"{block}.attention.output.dense"] == RowwiseParallel(multiple_of=8)
    assert plan[f"{block}.intermediate.dense"] == ColwiseParallel()
    assert plan[f"{block}.output.dense"] == RowwiseParallel()
    scattered = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    assert sequence_parallel[f"{block}.output.dense"] == scattered
    assert sequence_parallel[f"{block}.output.LayerNorm"] == SequenceParallel()


class _Flipped(BertLayer):
    """A block that reverses the features between the two modules of its MLP."""

    def feed_forward_chunk(self, attention_output: Tensor) -> Any:
        return self.output(self.intermediate(attention_output).flip(-1), attention_output)


def resolved_with_flipped_features() -> dict[str, Any]:
    """Return the rules of an MLP whose features are mixed between its modules, as two ranks prove them."""
    model = head_model(_row("bert", "masked"))
    for block in model.bert.encoder.layer:
        block.__class__ = _Flipped
    return dict(plan_for(model, mesh=mesh_for({"tp": 2})["tp"]))


def test_modules_apart_whose_features_are_mixed_in_between_are_gathered(two_ranks: RankPool) -> None:
    for plan in two_ranks.run(resolved_with_flipped_features):
        assert plan["bert.encoder.layer.*.intermediate"] == GatheredParameters(names=("dense.weight",))
        assert plan["bert.encoder.layer.*.attention.output.dense"] == RowwiseParallel(multiple_of=8)


# Refusals


def test_adapters_inside_a_module_around_the_model_are_refused() -> None:
    model = ActorCritic(peft.get_peft_model(tiny_model("LlamaForCausalLM"), ADAPTERS))
    with pytest.raises(UnknownArchitectureError, match="policy of ActorCritic carries adapters inside a module"):
        plan_for(model)
    model = peft.inject_adapter_in_model(ADAPTERS, ActorCritic(tiny_model("LlamaForCausalLM")))
    with pytest.raises(OptionError, match=r"q_proj of ActorCritic carries adapters, and the model is no PeftModel"):
        resolve_adapted_plan("auto", model, sequence_parallel=False)


def test_a_trunk_whose_stream_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(CapabilityError, match="has no sequence-parallel form"):
        plan_for(head_model(_row("gemma3n_text", "trunk")), sequence_parallel=True)
