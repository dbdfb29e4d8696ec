"""Divergence from a reference: exact over sharded vocabularies, and estimators that estimate it."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import rl_logprobs
from harness.ranks import RanksFailed
from rl_logprobs import kl_estimate, token_kl
from rl_logprobs.divergence import _check_same_shard
from rl_logprobs.softmax.vocab_shard import LocalLogits, TokenSlice, VocabColumns


def problem(vocab, dtype=torch.float64, scale=3.0, seed=0, tokens=(2, 4)):
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randn(2, *tokens, vocab, generator=generator, dtype=torch.float64) * scale
    return pair.to(dtype).unbind(0)


def exact_kl(logits, reference, temperature=1.0):
    p = torch.log_softmax(logits.double() / temperature, -1)
    q = torch.log_softmax(reference.double() / temperature, -1)
    return torch.where(p == -math.inf, 0, p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_of_both_sides_are_the_derivatives(temperature):
    logits, reference = (x.requires_grad_() for x in problem(6, tokens=(1, 3)))
    assert torch.autograd.gradcheck(lambda x, r: token_kl(x, r, temperature=temperature), (logits, reference))
    assert torch.autograd.gradcheck(lambda x: token_kl(x, reference.detach()), (logits,))
    assert torch.autograd.gradcheck(lambda r: token_kl(logits.detach(), r), (reference,))


@settings(max_examples=40)
@given(
    vocab=st.integers(1, 60),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    temperature=st.floats(0.1, 10),
    seed=st.integers(0, 2**16),
)
def test_any_pair_gives_the_float64_divergence(vocab, dtype, scale, temperature, seed):
    logits, reference = problem(vocab, dtype, scale, seed)
    found = token_kl(logits, reference, temperature=temperature)
    tolerance = 1e-12 if dtype is torch.float64 else 3e-6
    exact = exact_kl(logits, reference, temperature)
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


def test_equal_policies_do_not_diverge():
    logits, _ = problem(33, torch.bfloat16, 20.0)
    torch.testing.assert_close(token_kl(logits, logits.clone()), torch.zeros(2, 4), rtol=0, atol=1e-6)


def test_tokens_that_the_policy_rules_out_count_nothing():
    logits, reference = (x.requires_grad_() for x in problem(9))
    mask = torch.zeros(9).index_fill_(0, torch.tensor([1, 4]), -math.inf)
    both = token_kl(logits + mask, reference + mask)
    torch.testing.assert_close(both, exact_kl(logits + mask, reference + mask))
    (gradient,) = torch.autograd.grad(both.sum(), logits)
    assert (gradient[..., [1, 4]] == 0).all()
    assert gradient.isfinite().all()


def test_a_token_that_only_the_reference_rules_out_is_infinitely_far():
    logits, reference = problem(9)
    reference[..., 3] = -math.inf
    assert (token_kl(logits, reference) == math.inf).all()


def hard_pair(vocab):
    logits, reference = problem(vocab)
    if vocab > 8:
        logits[0, 0, : vocab // 2 + 3] = -math.inf
        reference[0, 0, : vocab // 4] = -math.inf
        logits[1, 1] *= 1e3
    return logits.requires_grad_(), reference.requires_grad_()


def values_and_gradients(logits, reference):
    found = token_kl(logits, reference, temperature=0.9)
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
    return [found.detach(), *torch.autograd.grad((found * weights).sum(), [logits, reference])]


def on_mesh(vocab):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    pair = [distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in hard_pair(vocab)]
    with CommDebugMode() as counter:
        found = values_and_gradients(*pair)
    return [found[0], *(g.full_tensor() for g in found[1:])], counter.get_total_counts()


@pytest.mark.parametrize("vocab", [5, 97, 130])
def test_every_split_agrees_with_one_process_in_one_collective(four_ranks, vocab):
    expected = values_and_gradients(*hard_pair(vocab))
    for found, collectives in four_ranks.run(on_mesh, vocab):
        assert collectives == 1
        for actual, desired in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, desired, rtol=1e-11, atol=1e-11)


def masked_on_mesh(give):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    logits, reference = problem(13)
    logits[0, 1], reference[1, 2] = math.nan, -math.inf
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    logits, reference = (distribute_tensor(x, mesh, [Shard(0), Shard(2)]).requires_grad_() for x in (logits, reference))
    local_mask = {"full": mask, "local": mask.chunk(2)[mesh.get_local_rank("dp")].bool()}[give]
    found = token_kl(logits, reference, mask=local_mask)
    gradients = torch.autograd.grad(found.sum(), [logits, reference])
    return mesh.get_local_rank("dp"), found.detach(), [g.full_tensor() for g in gradients]


@pytest.mark.parametrize("give", ["full", "local"])
def test_masked_tokens_are_zero_and_send_no_gradient_whatever_their_logits(four_ranks, give):
    logits, reference = (x.requires_grad_() for x in problem(13))
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    expected = token_kl(logits, reference) * mask
    gradients = torch.autograd.grad(expected.sum(), [logits, reference])
    for dp, found, found_gradients in four_ranks.run(masked_on_mesh, give):
        torch.testing.assert_close(found, expected.detach().chunk(2)[dp], rtol=1e-12, atol=1e-12)
        for actual, desired in zip(found_gradients, gradients, strict=True):
            torch.testing.assert_close(actual, desired, rtol=1e-12, atol=1e-12)


def placed_differently():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    logits, reference = problem(8)
    logits = distribute_tensor(logits, mesh, [Shard(2)])
    with CommDebugMode() as counter:
        try:
            token_kl(logits, reference)
        finally:
            assert counter.get_total_counts() == 0


def test_layouts_that_differ_are_refused_on_every_rank(two_ranks):
    with pytest.raises(RanksFailed) as caught:
        two_ranks.run(placed_differently)
    assert [failure.type_name for failure in caught.value.errors.values()] == ["ShapeError"] * 2


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_estimators_are_exact_or_close_on_average_over_the_policy(name):
    generator = torch.Generator().manual_seed(0)
    p = torch.log_softmax(torch.randn(50, generator=generator, dtype=torch.float64), -1)
    q = torch.log_softmax(p + 0.1 * torch.randn(50, generator=generator, dtype=torch.float64), -1)
    exact = (p.exp() * (p - q)).sum()
    average = (p.exp() * kl_estimate(p, q, name)).sum()
    torch.testing.assert_close(average, exact, rtol=0.05 if name == "k2" else 1e-12, atol=0)


def test_k3_is_never_negative_and_keeps_small_differences():
    logprobs = torch.full((3,), -2.0)
    reference = logprobs + torch.tensor([1e-3, 0.0, -1e-3])
    found = kl_estimate(logprobs, reference)
    torch.testing.assert_close(found[[0, 2]], torch.full((2,), 0.5e-6), rtol=1e-2, atol=0)
    assert (found >= 0).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, r: kl_estimate(x, r[:1]), rl_logprobs.errors.ShapeError, "differ"),
        (lambda x, r: kl_estimate(x, r, "k4"), rl_logprobs.errors.OptionError, "'k4'"),
        (lambda x, r: token_kl(x, r[..., 1:]), rl_logprobs.errors.ShapeError, "same tokens and columns"),
        (lambda x, r: token_kl(x, r.long()), rl_logprobs.errors.DtypeError, "floating"),
        (
            lambda x, r: token_kl(x, r, mask=torch.ones(2, 3)),
            rl_logprobs.errors.ShapeError,
            r"mask of shape \(2, 3\).*\(2, 4\)",
        ),
        (lambda x, r: token_kl(x, r, temperature=0.0), rl_logprobs.errors.OptionError, "temperature"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(*problem(9))


def test_differently_sharded_vocabularies_are_described_in_words():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    values, tokens = torch.zeros(1, 4), TokenSlice.all_of((1,))
    shards = VocabColumns(0, 4, 4, dist.group.WORLD), VocabColumns(0, 4, 4, None)
    policy, reference = (LocalLogits(values, shard, tokens) for shard in shards)
    message = r"the policy holds columns 0 to 4 of 4 over ranks \[0\] and the reference columns 0 to 4 of 4 on one rank"
    with pytest.raises(rl_logprobs.errors.PlacementError, match=message):
        _check_same_shard(policy, reference)
