"""Wrong arguments, generated, to every public function: an error for the caller, never one from inside of torch."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rl_logprobs
from harness.misuse import Call, complaint, wrong_arguments

TOKENS, VOCAB, FEATURES = (2, 4), 7, 3
#: The records that functions return.
RESULTS = {"TokenStatistics", "TopTokens"}


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


def parameters():
    found = [torch.nn.Parameter(floats(2, 3)), torch.nn.Parameter(floats(3))]
    for parameter in found:
        parameter.grad = torch.ones_like(parameter)
    return found


def sequence(name):
    return {name: ids(*TOKENS), "permutation": torch.arange(4), "group": dist.group.WORLD}


CALLS = {
    "SamplingFilter": Call(rl_logprobs.SamplingFilter),
    "clip_grad_norm_": Call(rl_logprobs.clip_grad_norm_, lambda: {"parameters": parameters(), "max_norm": 1.0}),
    "clip_grads_with_norm_": Call(
        rl_logprobs.clip_grads_with_norm_,
        lambda: {"parameters": parameters(), "max_norm": 1.0, "total_norm": torch.tensor(2.0)},
    ),
    "gather_sequence": Call(rl_logprobs.gather_sequence, lambda: sequence("local")),
    "grad_norm": Call(rl_logprobs.grad_norm, lambda: {"parameters": parameters()}),
    "grad_norms": Call(rl_logprobs.grad_norms, lambda: {"parameter_groups": {"all": parameters()}}),
    "headtail_permutation": Call(rl_logprobs.headtail_permutation, lambda: {"length": 8, "ranks": 2}),
    "kl_estimate": Call(
        rl_logprobs.kl_estimate, lambda: {"logprobs": floats(*TOKENS), "reference_logprobs": floats(*TOKENS)}
    ),
    "linear_token_logprobs": Call(rl_logprobs.linear_token_logprobs, hidden),
    "linear_token_statistics": Call(rl_logprobs.linear_token_statistics, hidden),
    "logprobs_at": Call(rl_logprobs.logprobs_at, lambda: {**logits(), "ids": ids(*TOKENS, 2)}),
    "next_token_targets": Call(rl_logprobs.next_token_targets, lambda: {"token_ids": ids(*TOKENS)}),
    "sample_tokens": Call(rl_logprobs.sample_tokens, lambda: {**logits(), "seed": 0}),
    "sequence_shard": Call(rl_logprobs.sequence_shard, lambda: sequence("full")),
    "should_skip_step": Call(rl_logprobs.should_skip_step, lambda: {"total_norm": torch.tensor(2.0)}),
    "token_kl": Call(rl_logprobs.token_kl, lambda: {**logits(), "reference_logits": floats(*TOKENS, VOCAB)}),
    "token_logprobs": Call(rl_logprobs.token_logprobs, scored),
    "token_statistics": Call(rl_logprobs.token_statistics, scored),
    "topk_logprobs": Call(rl_logprobs.topk_logprobs, lambda: {**logits(), "k": 2}),
}


@pytest.fixture(autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_every_public_function_is_called():
    public = {name for name in rl_logprobs.__all__ if not name.endswith("Error")}
    assert set(CALLS) == public - RESULTS


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_taken(name):
    call = CALLS[name]
    call.function(**call.valid())


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=60, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_wrong_arguments_are_refused_or_understood(name, data):
    changes = data.draw(wrong_arguments(CALLS[name]))
    assert complaint(CALLS[name], changes, rl_logprobs, rl_logprobs.LogprobsError) is None
