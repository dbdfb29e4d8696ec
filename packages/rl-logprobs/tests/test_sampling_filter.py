"""Log-probabilities under filtered sampling: those of the samplers that generate, on every split."""

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
from harness.pairwise import alternating_first
from rl_logprobs import SamplingFilter, token_logprobs, token_statistics

FILTERS = {
    "top-k": SamplingFilter(top_k=7),
    "top-k of one": SamplingFilter(top_k=1),
    "top-p": SamplingFilter(top_p=0.6),
    "min-p": SamplingFilter(min_p=0.1),
    "all, vLLM": SamplingFilter(top_k=20, top_p=0.8, min_p=0.05),
    "all, transformers": SamplingFilter(top_k=20, top_p=0.8, min_p=0.05, order="transformers"),
    "top-k beyond the vocabulary": SamplingFilter(top_k=10_000),
    "top-k of many": SamplingFilter(top_k=300),
    "top-k of many, top-p": SamplingFilter(top_k=300, top_p=0.9),
    "nothing": SamplingFilter(),
}


def problem(vocab, dtype=torch.float64, seed=0, tokens=(2, 5)):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*tokens, vocab, generator=generator, dtype=torch.float64) * 3
    return logits.to(dtype), torch.randint(0, vocab, tokens, generator=generator)


def warped(logits, sampling, temperature):
    """The filtered logits of transformers' warpers, in the order asked for."""
    transformers = pytest.importorskip("transformers")  # takes seconds, which the ranks can spare
    top_k = [transformers.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    top_p = [transformers.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    min_p = [transformers.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    scores = logits.flatten(0, -2) / temperature
    for warper in [*min_p, *top_k, *top_p] if sampling.order == "vllm" else [*top_k, *top_p, *min_p]:
        scores = warper(None, scores)
    return scores.view(logits.shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", FILTERS)
def test_the_filtered_distribution_is_that_of_transformers(name, temperature, dtype):
    logits, _ = problem(60)
    # Distinct logits that every dtype holds exactly: at a tie, transformers' sort decides what top-p keeps.
    logits = torch.argsort(torch.argsort(logits)).double() / 8
    scores = warped(logits, FILTERS[name], temperature)
    everywhere = token_logprobs(
        logits.to(dtype).unsqueeze(-2).expand(2, 5, 60, 60),
        torch.arange(60).expand(2, 5, 60),
        temperature=temperature,
        sampling=FILTERS[name],
    )
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    torch.testing.assert_close(everywhere.double(), torch.log_softmax(scores, -1), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("order", "kept"), [("vllm", 2), ("transformers", 3)])
def test_top_p_counts_what_min_p_removes_only_in_the_order_of_transformers(order, kept):
    # Above the third token lies 0.75 of the whole, but 0.852 of what min-p keeps.
    logits = torch.tensor([0.50, 0.25, 0.13, 0.12], dtype=torch.float64).log().expand(4, 4)
    sampling = SamplingFilter(top_p=0.85, min_p=0.25, order=order)
    assert token_logprobs(logits, torch.arange(4), sampling=sampling).isfinite().sum() == kept
    assert warped(logits, sampling, 1.0).isfinite().sum(-1).tolist() == [kept] * 4


def test_ties_with_the_last_of_top_k_are_all_kept():
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0]).expand(5, 5)
    found = token_logprobs(logits, torch.arange(5), sampling=SamplingFilter(top_k=2))
    assert found.isfinite().tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("top_k", [4, 300])
@pytest.mark.parametrize("top_p", [0.3, 0.75, 0.999])
def test_top_p_counts_the_ties_that_top_k_kept_beyond_its_number(top_k, top_p):
    probabilities = torch.tensor([0.30, 0.20, 0.10, 0.05], dtype=torch.float64)
    times = torch.tensor([1, 1, 3, 400])
    logits = probabilities.log().repeat_interleave(times).flip(0).expand(405, 405)
    sampling = SamplingFilter(top_k=top_k, top_p=top_p)
    kept = token_logprobs(logits, torch.arange(405), sampling=sampling).isfinite()
    counted = probabilities[: 3 if top_k == 4 else 4]
    above = (counted * times[: len(counted)]).cumsum(0) - counted * times[: len(counted)]
    levels = int((above < top_p * (above[-1] + counted[-1] * times[len(counted) - 1])).sum())
    assert kept.sum() == times[:levels].sum()


@pytest.mark.parametrize("name", FILTERS)
def test_gradients_are_those_of_the_masked_logits(name):
    logits, targets = problem(30)
    targets[0, 0] = -100
    leaf, masked = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = token_statistics(leaf, targets, entropy=True, sampling=FILTERS[name])
    floor = torch.log_softmax(warped(logits, FILTERS[name], 1.0), -1)
    expected = token_statistics(masked.masked_fill(floor == -math.inf, -math.inf), targets, entropy=True)
    possible = found.logprobs.isfinite()
    assert torch.equal(possible, expected.logprobs.isfinite())
    for statistics in (found, expected):
        (statistics.logprobs[possible].square().sum() + statistics.entropy.sum()).backward()
    torch.testing.assert_close(leaf.grad, masked.grad, rtol=1e-10, atol=1e-12)


def test_a_target_that_the_filter_removes_sends_no_gradient():
    logits, _ = problem(12)
    logits.requires_grad_()
    found = token_logprobs(logits, logits.argmin(-1), sampling=SamplingFilter(top_k=3))
    assert (found == -math.inf).all()
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert (gradient == 0).all()


@settings(max_examples=40)
@given(
    vocab=st.integers(1, 50),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    top_k=st.none() | st.integers(1, 60),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**16),
)
def test_what_is_kept_is_the_top_of_the_distribution_and_adds_up_to_one(vocab, dtype, top_k, top_p, min_p, seed):
    logits, _ = problem(vocab, dtype, seed, tokens=(3,))
    sampling = SamplingFilter(top_k=top_k, top_p=top_p, min_p=min_p)
    found = token_logprobs(
        logits.unsqueeze(1).expand(3, vocab, vocab), torch.arange(vocab).expand(3, vocab), sampling=sampling
    )
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(3, dtype=found.dtype), rtol=1e-5, atol=0)
    least_kept = logits.masked_fill(~found.isfinite(), math.inf).amin(-1, keepdim=True)
    assert torch.equal(found.isfinite(), logits >= least_kept)
    if top_k is not None:
        larger = (logits > least_kept).sum(-1)
        assert (larger < top_k).all()


def on_mesh(vocab, name, dtype):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    logits, targets = problem(vocab, dtype)
    sharded = distribute_tensor(logits, mesh, [Shard(2)])
    with CommDebugMode() as counter:
        found = token_statistics(sharded, targets, entropy=True, sampling=FILTERS[name], temperature=0.8)
    return found.logprobs, found.entropy, counter.get_total_counts()


@pytest.mark.parametrize(
    ("name", "problem_of"),
    alternating_first([*FILTERS], [(130, torch.float64), (130, torch.bfloat16), (5, torch.float64)]),
    ids=str,
)
def test_every_split_keeps_the_same_tokens(four_ranks, problem_of, name):
    vocab, dtype = problem_of
    logits, targets = problem(vocab, dtype)
    expected = token_statistics(logits, targets, entropy=True, sampling=FILTERS[name], temperature=0.8)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    for logprobs, entropy, _ in four_ranks.run(on_mesh, vocab, name, dtype):
        torch.testing.assert_close(logprobs, expected.logprobs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(entropy, expected.entropy, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "collectives"),
    [
        ("top-k", 1 + 1),  # the candidates; the sums
        ("all, vLLM", 1 + 1 + 1),  # the candidates, their ties; the sums
        ("min-p", 1 + 1),  # the peak; the sums
        ("top-p", 1 + 2 + 1),  # the peak, two rounds for half precision; the sums
        ("top-k of many", 1 + 2 + 1),  # the peak, two rounds; the sums
    ],
)
def test_a_threshold_costs_few_collectives(two_ranks, name, collectives):
    counts = [count for *_, count in two_ranks.run(on_mesh, 700, name, torch.bfloat16)]
    assert counts == [collectives] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k.*0"),
        ({"top_p": 0.0}, "top_p.*0.0"),
        ({"top_p": 1.1}, "top_p.*1.1"),
        ({"min_p": -0.1}, "min_p.*-0.1"),
        ({"min_p": 1.5}, "min_p.*1.5"),
        ({"order": "alphabetical"}, "order.*alphabetical"),
    ],
)
def test_filters_out_of_range_are_named(options, message):
    with pytest.raises(rl_logprobs.errors.OptionError, match=message):
        SamplingFilter(**options)
