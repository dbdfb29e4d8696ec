"""Policy objectives: those of verl's formulas, with gradients, at any masks and packing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_logprobs
from harness import policy_formulas
from harness.policy_formulas import sampled_batch as batch
from harness.policy_formulas import spoilt
from rl_logprobs import cispo_loss, gspo_loss, ppo_loss

SEEDS = st.integers(0, 2**16)
CLIPS = st.sampled_from([(0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4), (1.0, 3.0)])


def same_with_gradients(found, new, expected, reference, mask):
    torch.testing.assert_close(found, expected * mask, rtol=1e-12, atol=1e-12)
    (ours,) = torch.autograd.grad(found.sin().sum(), new)
    (theirs,) = torch.autograd.grad((expected * mask).sin().sum(), reference)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(seed=SEEDS, clips=CLIPS, dual=st.sampled_from([None, 1.2, 3.0]), spread=st.sampled_from([0.01, 0.5, 30.0]))
def test_ppo_is_verls_vanilla_loss(seed, clips, dual, spread):
    old, new, advantages, mask = batch(seed, spread)
    low, high = clips
    expected, clipped, lower = policy_formulas.verl_vanilla(old, new, advantages, low, high, dual or 1e9)
    leaf = spoilt(new, mask)
    found = ppo_loss(
        leaf, spoilt(old, mask, math.inf), spoilt(advantages, mask), mask, clip_low=low, clip_high=high, dual_clip=dual
    )
    same_with_gradients(found.loss, leaf, expected, new, mask)
    assert torch.equal(found.clipped_low | found.clipped_high, clipped & (mask != 0))
    assert torch.equal(found.dual_clipped, lower & (mask != 0))


@settings(max_examples=40)
@given(seed=SEEDS, clips=CLIPS)
def test_gspo_is_verls_loss_in_padded_and_in_packed_rows(seed, clips):
    old, new, advantages, mask = batch(seed, 0.1)
    low, high = clips
    expected = policy_formulas.verl_gspo(old, new, advantages, mask, low, high)
    leaf = spoilt(new, mask)
    found = gspo_loss(leaf, spoilt(old, mask), advantages, mask, clip_low=low, clip_high=high)
    same_with_gradients(found.loss, leaf, expected, new, mask)
    packed = gspo_loss(
        leaf.view(1, -1),
        spoilt(old, mask).view(1, -1),
        advantages.view(1, -1),
        mask.view(1, -1),
        clip_low=low,
        clip_high=high,
        segments=torch.arange(4).repeat_interleave(6).view(1, -1),
        num_segments=4,
    )
    torch.testing.assert_close(packed.loss.view_as(found.loss), found.loss, rtol=1e-14, atol=1e-14)


def test_the_gradient_of_gspo_is_that_of_the_sequence_objective():
    old, new, _, mask = batch(5, 0.05)
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.float64).unsqueeze(-1)
    weights = rl_logprobs.mean_weights(mask, per="sequence")
    found = rl_logprobs.global_mean(
        gspo_loss(new, old, advantages, mask, clip_low=0.9, clip_high=9).loss, mask, weights
    )
    sequence_ratio = (((new - old) * mask).sum(-1) / mask.sum(-1)).exp()
    expected = -(sequence_ratio * advantages[:, 0]).mean()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(loss, new, retain_graph=True)[0] for loss in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


@settings(max_examples=40)
@given(seed=SEEDS, clips=CLIPS, spread=st.sampled_from([0.01, 0.5, 30.0]))
def test_cispo_is_verls_loss_and_keeps_a_gradient_for_every_token(seed, clips, spread):
    old, new, advantages, mask = batch(seed, spread)
    low, high = clips
    leaf = spoilt(new, mask)
    found = cispo_loss(leaf, spoilt(old, mask), advantages, mask, clip_low=low, clip_high=high)
    same_with_gradients(found.loss, leaf, policy_formulas.verl_cispo(old, new, advantages, low, high), new, mask)
    if low < 1:
        (gradient,) = torch.autograd.grad(
            cispo_loss(leaf, spoilt(old, mask), advantages, mask, clip_low=low, clip_high=high).loss.sum(), leaf
        )
        assert ((gradient != 0) == (mask != 0)).all()


def test_equal_policies_have_ratio_1_and_the_gradient_of_reinforce():
    _, new, advantages, mask = batch(1)
    expected = -advantages * mask
    for loss in (ppo_loss, gspo_loss, lambda *args: cispo_loss(*args, clip_high=2.0)):
        found = loss(new, new.detach().clone(), advantages, mask)
        assert torch.equal(found.ratio, mask)
        assert not (found.clipped_low | found.clipped_high | found.dual_clipped).any()
        (gradient,) = torch.autograd.grad(found.loss.sum(), new)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_one_advantage_per_sequence_broadcasts():
    old, new, advantages, mask = batch(2)
    one = ppo_loss(new, old, advantages[:, :1], mask).loss
    torch.testing.assert_close(one, ppo_loss(new, old, advantages[:, :1].expand(4, 6), mask).loss, rtol=0, atol=0)


ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ppo_loss(ONE, ONE[:1], ONE, ONE), rl_logprobs.errors.ShapeError, r"\(2, 3\).*\(1, 3\)"),
        (lambda: ppo_loss(ONE, ONE, torch.ones(2), ONE), rl_logprobs.errors.ShapeError, "unsqueeze"),
        (lambda: ppo_loss(ONE, ONE, ONE, ONE[:1]), rl_logprobs.errors.ShapeError, r"mask has shape \(1, 3\)"),
        (lambda: ppo_loss(ONE, ONE, ONE, ONE, clip_low=1.2), rl_logprobs.errors.OptionError, r"\[0, 1\], got 1.2"),
        (lambda: ppo_loss(ONE, ONE, ONE, ONE, clip_high=-0.1), rl_logprobs.errors.OptionError, "got -0.1"),
        (
            lambda: ppo_loss(ONE, ONE, ONE, ONE, dual_clip=0.5),
            rl_logprobs.errors.OptionError,
            "greater than 1, got 0.5",
        ),
        (lambda: gspo_loss(ONE, ONE, ONE, ONE, num_segments=2), rl_logprobs.errors.OptionError, "belong together"),
    ],
)
def test_contradictions_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
