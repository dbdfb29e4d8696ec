"""Sequences split over a context-parallel axis: same log-probabilities and gradients as the full sequence."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import rl_logprobs
from rl_logprobs import (
    gather_sequence,
    headtail_permutation,
    next_token_targets,
    sequence_shard,
    token_logprobs,
)


def problem(length, vocab=29):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, length, vocab, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, vocab, (2, length), generator=generator)


def test_each_rank_gets_one_chunk_from_either_end():
    assert headtail_permutation(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert headtail_permutation(6, 3).tolist() == [0, 5, 1, 4, 2, 3]


@pytest.mark.parametrize(("length", "ranks"), [(9, 2), (6, 2), (4, 0)])
def test_lengths_that_do_not_divide_are_named(length, ranks):
    with pytest.raises(rl_logprobs.errors.ShapeError, match=f"{length} tokens"):
        headtail_permutation(length, ranks)


def permutations(name, length):
    return torch.arange(length) if name == "contiguous" else headtail_permutation(length, 2)


def through_context_parallelism(name):
    """cp 2 x tp 2: local logits in some order, log-probabilities of the full sequence in sequence order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    group = mesh.get_group("cp")
    logits, ids = problem(12)
    permutation = permutations(name, 12)
    local_logits = sequence_shard(logits, permutation, group, dim=1)
    local_logits = DTensor.from_local(
        distribute_tensor(local_logits, mesh["tp"], [Shard(2)]).to_local(),
        mesh,
        [Shard(1), Shard(2)],
        shape=logits.shape,
        stride=logits.stride(),
    ).requires_grad_()
    with CommDebugMode() as counter:
        local = token_logprobs(local_logits, sequence_shard(next_token_targets(ids), permutation, group))
        logprobs = gather_sequence(local, permutation, group)
    (gradient,) = torch.autograd.grad(logprobs.square().sum(), local_logits)
    in_order = gradient.full_tensor().index_select(1, permutation.argsort())
    return logprobs.detach(), in_order, counter.get_total_counts()


@pytest.mark.parametrize("name", ["contiguous", "load-balanced"])
def test_logprobs_and_gradients_are_those_of_the_full_sequence(four_ranks, name):
    logits, ids = problem(12)
    expected = token_logprobs(logits.requires_grad_(), ids, shift=True)
    (gradient,) = torch.autograd.grad(expected.square().sum(), logits)
    for found, found_gradient, collectives in four_ranks.run(through_context_parallelism, name):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-12, atol=1e-12)
        assert collectives == 2  # the softmax sums over tp, the log-probabilities over cp


def there_and_back(shape, dim):
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    permutation = headtail_permutation(shape[dim], 2)
    local = sequence_shard(full, permutation, dist.group.WORLD, dim=dim)
    return torch.equal(gather_sequence(local, permutation, dist.group.WORLD, dim=dim), full)


@pytest.mark.parametrize(("shape", "dim"), [((8,), 0), ((3, 8), -1), ((3, 8, 2), 1), ((8, 3), 0)])
def test_gathering_undoes_sharding_on_any_dim(two_ranks, shape, dim):
    assert two_ranks.run(there_and_back, shape, dim) == [True, True]


def with_a_short_permutation():
    with pytest.raises(rl_logprobs.errors.ShapeError, match=r"\(4,\) for 8 tokens over 2 ranks"):
        sequence_shard(torch.zeros(8), torch.arange(4), dist.group.WORLD)
    with pytest.raises(rl_logprobs.errors.ShapeError, match=r"\(7,\) for 7 tokens over 2 ranks"):
        sequence_shard(torch.zeros(7), torch.arange(7), dist.group.WORLD)
    with pytest.raises(rl_logprobs.errors.ShapeError, match=r"\(4,\) for 8 tokens over 2 ranks"):
        gather_sequence(torch.zeros(4), torch.arange(4), dist.group.WORLD)


def test_a_permutation_that_does_not_fit_is_refused_before_any_collective(two_ranks):
    two_ranks.run(with_a_short_permutation)
