"""Wrong arguments, generated, to every public function: an error for the caller, never one from inside of torch."""

import re

import pytest
import torch
import torch.distributed as dist

import rl_logprobs
from harness.misuse import Call, complaint, try_wrong_arguments
from rl_logprobs import distillation
from rl_logprobs.norms import grad_norm

TOKENS, VOCAB, FEATURES = (2, 4), 7, 3
#: The records that functions return.
RESULTS = {"TokenStatistics"}
#: What the caller wrote: its errors are the caller's.
CALLER = ("score", "progress")


def floats(*shape):
    return torch.linspace(-1, 1, steps=torch.Size(shape).numel()).reshape(shape).clone()


def ids(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % VOCAB


def logits():
    return {"logits": floats(*TOKENS, VOCAB)}


def scored():
    return {**logits(), "targets": ids(*TOKENS)}


def hidden():
    return {"hidden": floats(*TOKENS, FEATURES), "weight": floats(VOCAB, FEATURES), "targets": ids(*TOKENS)}


def linear():
    return rl_logprobs.LinearLogits(floats(*TOKENS, FEATURES), floats(VOCAB, FEATURES))


def parameters():
    found = [torch.nn.Parameter(floats(2, 3)), torch.nn.Parameter(floats(3))]
    for parameter in found:
        parameter.grad = torch.ones_like(parameter)
    return found


def ones():
    return torch.ones(*TOKENS)


def pair(other):
    return {"logprobs": floats(*TOKENS), other: floats(*TOKENS) / 2, "mask": ones()}


def policy():
    return {**pair("old_logprobs"), "advantages": floats(*TOKENS)}


def segmented():
    return {"segments": ids(*TOKENS), "num_segments": VOCAB}


def kept_tokens():
    return rl_logprobs.KeptTokens.from_rows([[0, token] for token in range(1, 5)] * 2)


def kept():
    return {"targets": torch.zeros(TOKENS, dtype=torch.int64), "kept_tokens": kept_tokens()}


def drift():
    generator = floats(*TOKENS)
    return {
        "generator_logprobs": generator,
        "score": lambda shift=0.5: floats(*TOKENS) + shift,
        "candidates": {"shift": {"shift": 0.0}},
    }


def metrics():
    trainer = policy()
    loss = rl_logprobs.ppo_loss(**trainer)
    return {**pair("other_logprobs"), "weights": ones(), "loss": loss}


def sequence(name):
    return {name: ids(*TOKENS), "permutation": torch.arange(4), "group": dist.group.WORLD}


CALLS = {
    "RatioMetrics.values": Call(rl_logprobs.ratio_metrics(**metrics()).values, lambda: {"group": dist.group.WORLD}),
    "LinearLogits": Call(rl_logprobs.LinearLogits, lambda: {"hidden": floats(2, 3), "weight": floats(VOCAB, 3)}),
    "SamplingFilter": Call(rl_logprobs.SamplingFilter),
    "VocabShard": Call(rl_logprobs.VocabShard, lambda: {"vocab_size": VOCAB, "group": dist.group.WORLD, "start": 0}),
    "KeptTokens": Call(rl_logprobs.KeptTokens, lambda: {"ids": ids(4), "offsets": torch.tensor([0, 1, 4])}),
    "KeptTokens.from_completions": Call(
        rl_logprobs.KeptTokens.from_completions, lambda: {"masks": [[[1, 2], [3]]], "starts": [1], "length": 4}
    ),
    "KeptTokens.from_padded": Call(
        rl_logprobs.KeptTokens.from_padded, lambda: {"ids": ids(*TOKENS), "sizes": torch.tensor([4, 2])}
    ),
    "KeptTokens.from_rows": Call(rl_logprobs.KeptTokens.from_rows, lambda: {"rows": [[1, 2], [], [3]]}),
    "KeptTokens.select": Call(kept_tokens().select, lambda: {"rows": torch.tensor([3, 0])}),
    "KeptTokens.to": Call(kept_tokens().to, lambda: {"device": torch.device("cpu")}),
    "cispo_loss": Call(rl_logprobs.cispo_loss, lambda: {**policy(), "clip_high": 2.0}),
    "clip_grad_norm_": Call(rl_logprobs.clip_grad_norm_, lambda: {"parameters": parameters(), "max_norm": 1.0}),
    "clip_grads_with_norm_": Call(
        grad_norm.clip_grads_with_norm_,
        lambda: {"parameters": parameters(), "max_norm": 1.0, "total_norm": torch.tensor(2.0)},
    ),
    "explain_drift": Call(rl_logprobs.explain_drift, drift, keep=CALLER),
    "gather_sequence": Call(rl_logprobs.gather_sequence, lambda: sequence("local")),
    "global_mean": Call(
        rl_logprobs.global_mean,
        lambda: {"values": floats(*TOKENS), "mask": ones(), "weights": rl_logprobs.mean_weights(ones())},
    ),
    "global_mean of sequences": Call(
        rl_logprobs.global_mean, lambda: {"values": floats(*TOKENS), "mask": ones(), "per": "sequence", **segmented()}
    ),
    "grad_norm": Call(rl_logprobs.grad_norm, lambda: {"parameters": parameters()}),
    "grad_norms": Call(rl_logprobs.grad_norms, lambda: {"parameter_groups": {"all": parameters()}}),
    "group_advantages": Call(
        rl_logprobs.group_advantages, lambda: {"rewards": floats(6), "prompt_ids": ids(6) // 2, "num_prompts": 3}
    ),
    "gspo_loss": Call(rl_logprobs.gspo_loss, policy),
    "gspo_loss of packed rows": Call(rl_logprobs.gspo_loss, lambda: {**policy(), **segmented()}),
    "headtail_permutation": Call(rl_logprobs.headtail_permutation, lambda: {"length": 8, "ranks": 2}),
    "importance_weights": Call(
        rl_logprobs.importance_weights,
        lambda: {**pair("generator_logprobs"), **segmented(), "level": "mean", "mode": "mask", "low": 0.5, "high": 2.0},
    ),
    "kept_logprobs": Call(distillation.kept_logprobs, lambda: {**logits(), "kept_tokens": kept_tokens()}),
    "kl_estimate": Call(
        rl_logprobs.kl_estimate, lambda: {"logprobs": floats(*TOKENS), "reference_logprobs": floats(*TOKENS)}
    ),
    "linear_token_logprobs": Call(rl_logprobs.linear_token_logprobs, hidden),
    "linear_token_statistics": Call(rl_logprobs.linear_token_statistics, hidden),
    "logprobs_at": Call(rl_logprobs.logprobs_at, lambda: {**logits(), "ids": ids(*TOKENS, 2)}),
    "next_token_targets": Call(rl_logprobs.next_token_targets, lambda: {"token_ids": ids(*TOKENS)}),
    "mean_weights": Call(rl_logprobs.mean_weights, lambda: {"masks": ones(), "per": "sequence", "length": 3.0}),
    "mean_weights of groups": Call(
        rl_logprobs.mean_weights, lambda: {"masks": [ones()], "per": "group", **segmented()}
    ),
    "ppo_loss": Call(rl_logprobs.ppo_loss, policy),
    "ratio_metrics": Call(rl_logprobs.ratio_metrics, metrics),
    "rejection_mask": Call(
        rl_logprobs.rejection_mask, lambda: {**pair("generator_logprobs"), "level": "max", "statistic": "k3"}
    ),
    "sample_tokens": Call(rl_logprobs.sample_tokens, lambda: {**logits(), "seed": 0}),
    "sampling_mask": Call(
        rl_logprobs.sampling_mask, lambda: {**logits(), "sampling": rl_logprobs.SamplingFilter(top_k=2)}
    ),
    "sequence_shard": Call(rl_logprobs.sequence_shard, lambda: sequence("full")),
    "should_skip_step": Call(rl_logprobs.should_skip_step, lambda: {"total_norm": torch.tensor(2.0)}),
    "token_divergence": Call(
        rl_logprobs.token_divergence,
        lambda: {"student": floats(*TOKENS, VOCAB), "teacher": floats(*TOKENS, VOCAB), "beta": 0.5},
    ),
    "token_divergence of hidden states": Call(
        rl_logprobs.token_divergence,
        lambda: {"student": linear(), "teacher": linear(), "temperature": 2.0, "mask": ones()},
    ),
    "token_divergence of a top-k": Call(
        rl_logprobs.token_divergence,
        lambda: {"student": linear(), "teacher": rl_logprobs.topk_logprobs(floats(*TOKENS, VOCAB), 3)},
    ),
    "token_kl": Call(rl_logprobs.token_kl, lambda: {**logits(), "reference_logits": floats(*TOKENS, VOCAB)}),
    "token_logprobs": Call(rl_logprobs.token_logprobs, scored),
    "token_statistics": Call(rl_logprobs.token_statistics, scored),
    "topk_logprobs": Call(rl_logprobs.topk_logprobs, lambda: {**logits(), "k": 2}),
}


@pytest.fixture(autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_the_table_of_contents_names_what_is_public():
    named = set(re.findall(r"``(\w+)``", rl_logprobs.__doc__))
    assert named - {"rl_logprobs"} == set(rl_logprobs.__all__)
    assert len(rl_logprobs.__all__) <= 39


def test_every_public_function_is_called():
    public = {name for name in rl_logprobs.__all__ if not name.endswith("Error")}
    called = {name.partition(".")[0].partition(" ")[0] for name in CALLS}
    assert called - {"RatioMetrics", "kept_logprobs", "clip_grads_with_norm_"} == public - RESULTS


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_taken(name):
    call = CALLS[name]
    call.function(**call.valid())


#: Numbers that a caller writes as integers of any size, such as ``10**30`` for no bound.
ANY_SIZE = [
    ("cispo_loss", "clip_high"),
    ("clip_grad_norm_", "max_norm"),
    ("group_advantages", "eps"),
    ("gspo_loss", "clip_high"),
    ("importance_weights", "high"),
    ("linear_token_logprobs", "logit_scale"),
    ("linear_token_logprobs", "softcap"),
    ("mean_weights", "count"),
    ("ppo_loss", "clip_high"),
    ("ppo_loss", "dual_clip"),
    ("rejection_mask", "high"),
    ("rejection_mask", "low"),
    ("should_skip_step", "max_norm"),
]


@pytest.mark.parametrize(("name", "argument"), ANY_SIZE)
def test_a_bound_may_be_an_integer_of_any_size(name, argument):
    call = CALLS[name]
    of_integer, of_float = (call.function(**{**call.valid(), argument: value}) for value in (10**30, 1e30))
    assert repr(of_integer) == repr(of_float)


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("clip_grads_with_norm_", "total_norm", "None"),
        ("clip_grads_with_norm_", "total_norm", "object()"),
        ("grad_norm", "groups", "list of tensors"),
        ("mean_weights", "group", "parameters"),
        ("token_divergence of a top-k", "tail", "1.5"),
        ("token_divergence of hidden states", "mask", "on meta"),
        ("token_divergence of hidden states", "mask", "sparse tensor"),
    ],
)
def test_one_wrong_argument_is_refused_or_understood(name, argument, value):
    assert complaint(CALLS[name], ((argument, value),), rl_logprobs, rl_logprobs.LogprobsError) is None


@pytest.mark.parametrize("examples", [10, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_refused_or_understood(name, examples):
    try_wrong_arguments(CALLS[name], rl_logprobs, rl_logprobs.LogprobsError, examples=examples)


@pytest.mark.parametrize(
    "call",
    [
        CALLS["token_logprobs"],
        CALLS["linear_token_logprobs"],
        CALLS["token_divergence"],
        CALLS["logprobs_at"],
        Call(rl_logprobs.gather_sequence, lambda: {**sequence("local"), "local": floats(*TOKENS)}),
        Call(rl_logprobs.token_logprobs, lambda: {**scored(), **kept()}),
        Call(rl_logprobs.linear_token_logprobs, lambda: {**hidden(), **kept()}),
    ],
    ids=lambda call: call.function.__name__,
)
def test_a_gradient_of_a_gradient_is_refused(call):
    arguments = call.valid()
    first = next(name for name, value in arguments.items() if isinstance(value, torch.Tensor))
    arguments[first].requires_grad_()
    with pytest.raises(rl_logprobs.LogprobsError, match="gradients of gradients"):
        torch.autograd.grad(call.function(**arguments).sum(), arguments[first], create_graph=True)


@pytest.mark.parametrize(
    ("module", "name"), [(rl_logprobs, "Support"), (rl_logprobs, "kept_logprobs"), (rl_logprobs.errors, "SupportError")]
)
def test_a_former_name_states_its_present_place(module, name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use rl_logprobs"):
        getattr(module, name)
