"""Corrections between generator and trainer: verl's and NeMo RL's formulas; metrics; gradients of divergences."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_logprobs
from harness import policy_formulas
from harness.policy_formulas import sampled_batch as batch
from harness.policy_formulas import spoilt
from rl_logprobs import importance_weights, kl_estimate, ppo_loss, ratio_metrics, rejection_mask

SEEDS = st.integers(0, 2**16)


@settings(max_examples=40)
@given(seed=SEEDS, spread=st.sampled_from([0.01, 0.5, 15.0]), bounds=st.sampled_from([(None, 2.0), (0.5, 5.0)]))
def test_weights_are_those_of_verl_and_nemo_rl(seed, spread, bounds):
    generator, trainer, _, mask = batch(seed, spread)
    trainer = trainer.detach()
    low, high = bounds
    padded = spoilt(trainer, mask), spoilt(generator, mask), mask
    for level in ("token", "sequence"):
        expected = policy_formulas.verl_rollout_weights(trainer - generator, mask, level, high, low)
        mode = "truncate" if low is None else "mask"
        found = importance_weights(*padded, level=level, mode=mode, low=low, high=high)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if spread > 10:
        return  # NeMo RL does not bound log-ratios
    for kind in ("tis", "icepop", "seq-mask-tis"):
        expected = policy_formulas.nemo_truncated_importance_weights(trainer, generator, mask, kind, high, low or 0.0)
        if kind == "seq-mask-tis":
            found = importance_weights(*padded) * rejection_mask(*padded, level="mean", low=low, high=high)
        else:
            found = importance_weights(*padded, mode="mask" if kind == "icepop" else "truncate", low=low, high=high)
            expected = expected.clamp(min=low) if kind == "tis" and low is not None else expected
        torch.testing.assert_close(found, expected * mask, rtol=1e-7, atol=1e-9)


OPTIONS = [f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3")]
LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "mean", "seq_max": "max"}


@settings(max_examples=60)
@given(seed=SEEDS, option=st.sampled_from([o for o in OPTIONS if o != "seq_max_k1"]), packed=st.booleans())
def test_rejection_is_that_of_verl(seed, option, packed):
    generator, trainer, _, mask = batch(seed, 0.5)
    trainer = trainer.detach()
    level, statistic = option.rsplit("_", 1)
    if statistic == "k1":  # verl bounds the generator's probability over the trainer's
        expected = policy_formulas.verl_rejection(trainer - generator, mask, option, 1.5, 0.6)
        bounds = {"statistic": "ratio", "low": 1 / 1.5, "high": 1 / 0.6}
    else:
        expected = policy_formulas.verl_rejection(trainer - generator, mask, option, 0.2)
        bounds = {"statistic": statistic, "high": 0.2}
    inputs = [spoilt(trainer, mask), spoilt(generator, mask), mask]
    if packed:
        inputs = [x.view(1, -1) for x in inputs]
        bounds |= {"segments": torch.arange(4).repeat_interleave(6).view(1, -1), "num_segments": 4}
    found = rejection_mask(*inputs, level=LEVELS[level], **bounds)
    assert torch.equal(found.view_as(expected), expected)


def over_context_parallel_ranks():
    generator, trainer, advantages, mask = batch(3, 0.3)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    local = [x.detach()[:, mine] for x in (trainer, generator, mask)]
    options = {"cp_group": dist.group.WORLD}
    gspo = rl_logprobs.gspo_loss(local[0], local[1], advantages[:, mine], local[2], **options).loss
    weights = importance_weights(*local, level="mean", high=1.1, **options)
    kept = rejection_mask(*local, level="max", statistic="k3", high=0.1, **options)
    loss = ppo_loss(local[0], local[1], advantages[:, mine], local[2])
    metrics = ratio_metrics(*local, weights=weights, loss=loss).values(dist.group.WORLD)
    return gspo, weights, kept, metrics


def test_sequences_over_several_ranks_are_whole(two_ranks):
    generator, trainer, advantages, mask = batch(3, 0.3)
    trainer = trainer.detach()
    whole = trainer, generator, mask
    weights = importance_weights(*whole, level="mean", high=1.1)
    expected = [
        rl_logprobs.gspo_loss(trainer, generator, advantages, mask).loss,
        weights,
        rejection_mask(*whole, level="max", statistic="k3", high=0.1),
    ]
    metrics = ratio_metrics(*whole, weights=weights, loss=ppo_loss(trainer, generator, advantages, mask)).values()
    for rank, (*found, rank_metrics) in enumerate(two_ranks.run(over_context_parallel_ranks)):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs[:, rank::2], rtol=1e-12, atol=1e-12)
        assert rank_metrics.keys() == metrics.keys()
        for name, value in metrics.items():
            torch.testing.assert_close(rank_metrics[name], value, rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(seed=SEEDS, cut=st.integers(1, 3))
def test_metrics_are_those_of_verl_over_any_micro_batches(seed, cut):
    rollout, trainer, advantages, mask = batch(seed)
    trainer = trainer.detach()
    weights = importance_weights(trainer, rollout, mask, high=1.2)
    loss = ppo_loss(trainer, rollout, advantages, mask)
    parts = [
        ratio_metrics(
            spoilt(trainer, mask)[rows],
            spoilt(rollout, mask)[rows],
            mask[rows],
            weights=weights[rows],
            loss=type(loss)(*(field[rows] for field in loss)),
        )
        for rows in (slice(0, cut), slice(cut, None))
    ]
    found = (parts[0] + parts[1]).values()
    expected = policy_formulas.verl_offpolicy_metrics(trainer, rollout, mask, weights)
    ratio = (trainer - rollout).exp()[mask != 0]
    expected |= {
        "tokens": mask.sum(),
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "weight_mean": weights.sum() / mask.sum(),
        "clipped_high": loss.clipped_high.sum() / mask.sum(),
        "clipped_low": loss.clipped_low.sum() / mask.sum(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, check_dtype=False)


def divergence_gradients(estimate, sampled_from):
    """The expected gradient of an estimator over all tokens that a policy may sample, and the policy's logits."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.4, 0.2], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    probabilities = (logprobs.detach() if sampled_from is None else sampled_from).exp()
    (found,) = torch.autograd.grad((probabilities * estimate(logprobs, reference)).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((reference.exp() * (reference - logprobs)).sum(), logits)
    return found, exact, reverse


OTHER = torch.tensor([0.1, 0.2, 0.4, 0.3], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("options", "sampled_from"),
    [
        ({"estimator": "k2"}, None),
        ({"estimator": "k1", "gradient": "unbiased"}, None),
        ({"estimator": "k3", "gradient": "unbiased"}, None),
        ({"estimator": "k1", "sampled_logprobs": OTHER}, OTHER),
        ({"estimator": "k3", "sampled_logprobs": OTHER}, OTHER),
    ],
)
def test_unbiased_forms_have_the_gradient_of_the_divergence(options, sampled_from):
    found, exact, _ = divergence_gradients(lambda p, q: kl_estimate(p, q, **options), sampled_from)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)


def test_the_plain_estimators_have_other_gradients():
    k1, exact, _ = divergence_gradients(lambda p, q: kl_estimate(p, q, "k1"), None)
    torch.testing.assert_close(k1, torch.zeros_like(k1), rtol=0, atol=1e-14)
    k3, _, reverse = divergence_gradients(lambda p, q: kl_estimate(p, q, "k3"), None)
    torch.testing.assert_close(k3, reverse, rtol=1e-12, atol=1e-14)
    assert (k3 - exact).abs().max() > 0.05


ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: importance_weights(ONE, ONE, ONE, level="word"), "'word'"),
        (lambda: importance_weights(ONE, ONE, ONE, mode="drop"), "'drop'"),
        (lambda: importance_weights(ONE, ONE, ONE, low=3.0, high=2.0), r"at least low \(3.0\), got 2.0"),
        (lambda: rejection_mask(ONE, ONE, ONE, statistic="k4"), "'k4'"),
        (lambda: rejection_mask(ONE, ONE, ONE, level="batch"), "'batch'"),
        (lambda: kl_estimate(ONE, ONE, gradient="none"), "'none'"),
        (lambda: kl_estimate(ONE, ONE, gradient="unbiased", sampled_logprobs=ONE), "leave out sampled_logprobs"),
    ],
)
def test_contradictions_are_named(call, message):
    with pytest.raises(rl_logprobs.errors.OptionError, match=message):
        call()


def test_a_rank_without_tokens_adds_nothing_to_the_metrics():
    some, none = torch.tensor([[-1.0, -2.0]]), torch.empty(1, 0)
    alone = ratio_metrics(some, some - 0.1, ONE[:1, :2]).values()
    both = (ratio_metrics(some, some - 0.1, ONE[:1, :2]) + ratio_metrics(none, none, none)).values()
    assert all(torch.equal(alone[name], both[name]) for name in alone)
    assert rejection_mask(none, none, none, level="max").shape == none.shape
