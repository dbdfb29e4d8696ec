"""Noise that is a function of seed, place and id: Gumbel-distributed, and without any link between the three."""

import math

import torch

from rl_logprobs.softmax.gumbel import gumbel_noise, token_keys

EULER = 0.5772156649015329


def noise(seed, places, ids):
    return gumbel_noise(token_keys(seed, torch.as_tensor(places)), torch.as_tensor(ids))


def test_noise_follows_the_gumbel_distribution():
    drawn = noise(3, range(400), range(500)).flatten().sort().values
    cumulated = torch.exp(-torch.exp(-drawn))
    gap = (cumulated - torch.linspace(0, 1, drawn.numel(), dtype=drawn.dtype)).abs().max()
    assert gap < 1.95 / math.sqrt(drawn.numel())  # Kolmogorov and Smirnov, at a level of one in a thousand
    assert abs(drawn.mean() - EULER) < 5 * math.pi / math.sqrt(6 * drawn.numel())


def test_columns_of_a_shard_are_those_of_the_full_vocabulary():
    full = noise(7, range(20), range(1000))
    assert torch.equal(noise(7, range(5, 9), range(313, 700)), full[5:9, 313:700])


def test_neighbouring_seeds_places_and_ids_are_uncorrelated():
    first = noise(0, range(300), range(300))
    shifted_seed = noise(1, range(300), range(300))
    for other in (shifted_seed, first.roll(1, 0), first.roll(1, 1), first.T, shifted_seed.roll(1, 0)):
        correlation = torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 5 / 300


def test_all_noise_is_finite_for_seeds_of_any_size():
    for seed in (0, -1, 2**63, 2**64 - 1, -(2**63), 10**30):
        assert noise(seed, range(50), range(2000)).isfinite().all()
    assert not torch.equal(noise(2**63, [0], [0]), noise(0, [0], [0]))
