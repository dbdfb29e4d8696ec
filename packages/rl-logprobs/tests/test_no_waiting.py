"""On an accelerator the host waits for nothing: tensors without values cannot tell it any."""

import math

import pytest
import torch

import rl_logprobs
from rl_logprobs import KeptTokens, SamplingFilter

SHAPE = (3, 5)


def logits():
    return torch.empty(*SHAPE, 300, device="meta", dtype=torch.bfloat16, requires_grad=True)


def ids(*shape):
    return torch.zeros(shape or SHAPE, device="meta", dtype=torch.int64)


def statistics(**options):
    temperature = torch.ones(*SHAPE, device="meta")
    found = rl_logprobs.token_statistics(
        logits(), ids(), argmax=True, target_rank=True, temperature=temperature, shift=True, **options
    )
    return found.logprobs + found.logsumexp + (0 if found.entropy is None else found.entropy)


def from_hidden(vocab=300, **options):
    hidden = torch.empty(*SHAPE, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(vocab, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    return rl_logprobs.linear_token_logprobs(hidden, weight, ids(), **options)


def kept():
    kept_tokens = KeptTokens.from_padded(torch.arange(4).expand(*SHAPE, 4))
    return kept_tokens.to("meta")


def per_token():
    return torch.empty(*SHAPE, device="meta", requires_grad=True)


def policy_step():
    mask, segments = torch.ones(SHAPE, device="meta"), {"segments": ids(), "num_segments": 4}
    advantages = rl_logprobs.group_advantages(per_token()[0].detach(), ids(5), 2)
    losses = [
        rl_logprobs.ppo_loss(per_token(), per_token(), advantages, mask, dual_clip=3.0),
        rl_logprobs.gspo_loss(per_token(), per_token(), advantages, mask, **segments),
        rl_logprobs.cispo_loss(per_token(), per_token(), advantages, mask, clip_high=2.0),
    ]
    options = {"level": "mean", "low": 0.5, "high": 2.0, **segments}
    weights = rl_logprobs.importance_weights(per_token(), per_token(), mask, mode="mask", **options)
    kept = rl_logprobs.rejection_mask(per_token(), per_token(), mask, **options)
    rl_logprobs.ratio_metrics(per_token(), per_token(), mask, weights=weights, loss=losses[0]).values()
    for per in ("token", "sequence", "group"):
        given = {} if per == "token" else segments
        token_weights = rl_logprobs.mean_weights(mask, per=per, **given)
        loss = sum(one.loss for one in losses) * weights * kept
        rl_logprobs.global_mean(loss, mask, token_weights, segments=given.get("segments")).backward(retain_graph=True)


def divergence(beta):
    def head(features):
        shapes = (*SHAPE, features), (300, features)
        return [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]

    student, teacher = (rl_logprobs.LinearLogits(*head(features), softcap=3.0) for features in (8, 12))
    return rl_logprobs.token_divergence(student, teacher, beta=beta, mask=ids())


STEPS = {
    "entropy": lambda: statistics(entropy=True).sum().backward(),
    "inplace_backward": lambda: statistics(inplace_backward=True).sum().backward(),
    "inplace_forward": lambda: statistics(inplace_forward=True).sum().backward(),
    "top-k": lambda: statistics(sampling=SamplingFilter(top_k=3, top_p=0.9)).sum().backward(),
    "top-p": lambda: statistics(sampling=SamplingFilter(top_p=0.9, min_p=0.1)).sum().backward(),
    "sample": lambda: rl_logprobs.sample_tokens(logits(), seed=1, sampling=SamplingFilter(top_k=3)),
    "topk_logprobs": lambda: rl_logprobs.topk_logprobs(logits(), 4),
    "logprobs_at": lambda: rl_logprobs.logprobs_at(logits(), ids(*SHAPE, 2)).sum().backward(),
    "token_kl": lambda: rl_logprobs.token_kl(logits(), logits(), mask=ids()).sum().backward(),
    "token_divergence": lambda: divergence(beta=1.0).sum().backward(),
    "token_divergence of a mixture": lambda: divergence(beta=0.5).sum().backward(),
    "from hidden": lambda: from_hidden(shift=True, softcap=3.0).sum().backward(),
    "kept sets": lambda: statistics(entropy=True, kept_tokens=kept()).sum().backward(),
    "kept sets from hidden": lambda: from_hidden(shift=True, softcap=3.0, kept_tokens=kept()).sum().backward(),
    "kept rows of a head": lambda: from_hidden(vocab=4000, kept_tokens=kept()).sum().backward(),
    "divergence over kept sets": lambda: rl_logprobs.token_kl(logits(), logits(), kept_tokens=kept()).sum().backward(),
    "policy gradients": policy_step,
    "targets": lambda: rl_logprobs.next_token_targets(ids(7), cu_seqlens=ids(3)),
}


@pytest.mark.parametrize("name", STEPS)
def test_log_probabilities_need_no_value_on_the_host(name):
    STEPS[name]()


@pytest.mark.parametrize("order", [2.0, 3.0, math.inf])
def test_norms_clipping_and_skipping_need_no_value_on_the_host(order):
    dtypes = (torch.bfloat16, torch.float32)
    parameters = [torch.empty(3000, 2, device="meta", dtype=dtype, requires_grad=True) for dtype in dtypes]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    rl_logprobs.should_skip_step(rl_logprobs.clip_grad_norm_(parameters, 1.0, order))
    rl_logprobs.grad_norms({"all": parameters, "first": parameters[0]}, order)


def test_an_error_for_norms_that_are_not_finite_waits_because_it_was_asked_for():
    parameter = torch.empty(3, device="meta", requires_grad=True)
    parameter.grad = torch.empty_like(parameter)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        rl_logprobs.grad_norm(parameter, error_if_nonfinite=True)
