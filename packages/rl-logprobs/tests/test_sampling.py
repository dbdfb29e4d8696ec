"""Choosing tokens from sharded logits: the same choice on every rank and every split."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import rl_logprobs
from rl_logprobs import SamplingFilter, sample_tokens, topk_logprobs


def tied_logits(vocab, dtype=torch.float64):
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(2, 3, vocab, generator=generator, dtype=torch.float64) * 2).round().to(dtype)


def exact_topk(logits, k, temperature=1.0):
    """By a stable sort: of equal logits the lower ids first."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return order, torch.log_softmax(logits.double() / temperature, -1).gather(-1, order)


@pytest.mark.parametrize("k", [1, 3, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-6)])
def test_exactly_k_tokens_the_lower_ids_first_among_equals(k, dtype, tolerance):
    logits = tied_logits(40, dtype)
    ids, logprobs = topk_logprobs(logits, k, temperature=0.7)
    exact_ids, exact = exact_topk(logits, k, 0.7)
    assert torch.equal(ids, exact_ids)
    torch.testing.assert_close(logprobs.double(), exact, rtol=tolerance, atol=tolerance)


def topk_on_mesh(vocab, k):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    sharded = distribute_tensor(tied_logits(vocab), mesh, [Shard(2)])
    with CommDebugMode() as counter:
        found = topk_logprobs(sharded, k)
    return found.ids, found.logprobs, counter.get_total_counts()


@pytest.mark.parametrize(("vocab", "k"), [(130, 4), (130, 50), (5, 5), (97, 1)])
def test_every_split_finds_the_same_tokens_in_one_collective(four_ranks, vocab, k):
    exact_ids, exact = exact_topk(tied_logits(vocab), k)
    for ids, logprobs, collectives in four_ranks.run(topk_on_mesh, vocab, k):
        assert torch.equal(ids, exact_ids)
        torch.testing.assert_close(logprobs, exact, rtol=1e-12, atol=1e-12)
        assert collectives == 1


def drawn_on_mesh(draws, sampling):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    logits = torch.linspace(0, 3, 7).expand(draws, 7).contiguous()
    sharded = distribute_tensor(logits, mesh, [Shard(1)])
    first = sample_tokens(sharded, seed=5, temperature=0.8, sampling=sampling)
    again = sample_tokens(sharded, seed=5, temperature=0.8, sampling=sampling)
    other = sample_tokens(sharded, seed=6, temperature=0.8, sampling=sampling)
    return first, torch.equal(first, again), torch.equal(first, other)


@pytest.mark.parametrize("sampling", [None, SamplingFilter(top_k=3)])
def test_samples_follow_the_distribution_and_agree_on_all_ranks(four_ranks, sampling):
    draws = 20_000
    results = four_ranks.run(drawn_on_mesh, draws, sampling)
    scaled = torch.linspace(0, 3, 7) / 0.8
    if sampling is not None:
        scaled[:4] = -math.inf
    expected = torch.softmax(scaled, 0)
    sample = results[0][0]
    frequencies = torch.bincount(sample, minlength=7) / draws
    error = (expected * (1 - expected) / draws).sqrt()
    assert ((frequencies - expected).abs() <= 4.5 * error).all()
    for found, repeated, unchanged in results:
        assert torch.equal(found, sample)
        assert repeated
        assert not unchanged


def drawn_on_grid(dp, vocab):
    mesh = init_device_mesh("cpu", (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "tp"))
    sharded = distribute_tensor(tied_logits(vocab), mesh, [Shard(1), Shard(2)])
    found = sample_tokens(sharded, seed=torch.Generator().manual_seed(4), temperature=1.5)
    return DTensor.from_local(found, mesh, [Shard(1), Replicate()], shape=(2, 3), stride=(3, 1)).full_tensor()


@pytest.mark.parametrize("vocab", [5, 130])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_every_split_of_tokens_and_vocabulary_draws_the_same(four_ranks, dp, vocab):
    expected = sample_tokens(tied_logits(vocab), seed=torch.Generator().manual_seed(4), temperature=1.5)
    for found in four_ranks.run(drawn_on_grid, dp, vocab):
        assert torch.equal(found, expected)


def test_a_generator_moves_on_from_call_to_call():
    generator = torch.Generator().manual_seed(0)
    first, second = (sample_tokens(torch.zeros(50, 100), seed=generator) for _ in range(2))
    assert not torch.equal(first, second)


def test_one_temperature_a_token_sharpens_each_on_its_own():
    logits = torch.linspace(0, 1, 5).expand(4000, 5)
    temperature = torch.where(torch.arange(4000) < 2000, 1e-3, 100.0)
    sample = sample_tokens(logits, seed=0, temperature=temperature)
    assert (sample[:2000] == 4).all()
    assert torch.bincount(sample[2000:], minlength=5).min() > 300


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: topk_logprobs(x, 0), rl_logprobs.errors.OptionError, "from 1 to.* 9, got 0"),
        (lambda x: topk_logprobs(x, 10), rl_logprobs.errors.OptionError, "got 10"),
        (lambda x: topk_logprobs(x.long(), 2), rl_logprobs.errors.DtypeError, "floating"),
        (lambda x: sample_tokens(x, seed=0, temperature=-1.0), rl_logprobs.errors.OptionError, "temperature"),
        (lambda x: sample_tokens(x[:0], seed=0), rl_logprobs.errors.ShapeError, "at least one token"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.zeros(4, 9))


@pytest.mark.parametrize("sampling", [None, SamplingFilter(top_k=2)])
def test_rows_without_a_token_to_sample_are_marked(sampling):
    logits = torch.full((4, 5), -math.inf)
    logits[1] = math.nan
    logits[2, 3] = math.nan
    logits[3, 4] = 0.0
    assert sample_tokens(logits, seed=0, sampling=sampling).tolist() == [-1, -1, -1, 4]
