"""NeMo RL's names: their signatures, and the results that the single-process model gives."""

import inspect
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rl_logprobs
from rl_logprobs import headtail_permutation, nemo


def problem(vocab, length=8):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(2, length, vocab, generator=generator) * 3
    return logits, torch.randint(0, vocab, (2, length), generator=generator)


def expected_logprobs(logits, ids):
    return torch.log_softmax(logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (nemo.to_local_if_dtensor, ["tensor"]),
        (nemo.get_grad_norm, ["parameters", "dp_cp_group", "tp_group", "norm_type", "dtype"]),
        (nemo.clip_grad_by_total_norm_, ["parameters", "max_grad_norm", "total_norm", "dtype"]),
        (nemo.get_logprobs_from_vocab_parallel_logits, ["vocab_parallel_logits", "input_ids", "seq_index"]),
    ],
)
def test_signatures_are_those_of_nemo_rl(function, names):
    assert list(inspect.signature(function).parameters) == names


def logprobs_on_tp(vocab):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    logits, ids = problem(vocab)
    sharded = distribute_tensor(logits, mesh, [Replicate(), Shard(2)])
    return nemo.get_logprobs_from_vocab_parallel_logits(sharded, ids)


@pytest.mark.parametrize("vocab", [16, 17])
def test_logprobs_are_those_of_the_full_softmax_at_any_vocabulary(four_ranks, vocab):
    expected = expected_logprobs(*problem(vocab))
    for found in four_ranks.run(logprobs_on_tp, vocab):
        torch.testing.assert_close(found, expected)


def logprobs_on_cp(vocab):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    logits, ids = problem(vocab)
    seq_index = headtail_permutation(8, 2)
    sharded = distribute_tensor(logits[:, seq_index], mesh, [Shard(1), Shard(2)])
    return nemo.get_logprobs_from_vocab_parallel_logits(
        sharded, distribute_tensor(ids[:, seq_index], mesh["cp"], [Shard(1)]), seq_index
    )


def test_context_parallel_logprobs_come_back_in_sequence_order(four_ranks):
    expected = expected_logprobs(*problem(17))
    for found in four_ranks.run(logprobs_on_cp, 17):
        torch.testing.assert_close(found, expected)


def without_context_parallelism():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits, ids = problem(16)
    sharded = distribute_tensor(logits, mesh, [Shard(2)])
    with pytest.raises(rl_logprobs.errors.OptionError, match="axis named cp"):
        nemo.get_logprobs_from_vocab_parallel_logits(sharded, ids, torch.arange(8))


def test_a_sequence_index_needs_a_context_parallel_axis(two_ranks):
    two_ranks.run(without_context_parallelism)


def norm_and_clip(norm_type):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    gradients = [torch.full((6, 2), 3.0), torch.linspace(-1, 2, 5)]
    parameters = []
    for gradient, placements in zip(gradients, ([Shard(0), Shard(1)], [Shard(0), Replicate()]), strict=True):
        parameter = distribute_tensor(torch.zeros_like(gradient), mesh, placements).bfloat16().detach().requires_grad_()
        parameter.grad = distribute_tensor(gradient, mesh, placements).bfloat16()
        parameters.append(parameter)
    norm = nemo.get_grad_norm(parameters, mesh.get_group("dp"), mesh.get_group("tp"), norm_type)
    nemo.clip_grad_by_total_norm_(parameters, 1.0, norm)
    after = nemo.get_grad_norm(parameters, mesh.get_group("dp"), mesh.get_group("tp"), norm_type)
    flat = torch.cat([g.bfloat16().double().flatten() for g in gradients])
    return norm, torch.linalg.vector_norm(flat, float(norm_type)).item(), after


@pytest.mark.parametrize("norm_type", [2, "inf", math.inf])
def test_replicas_count_once_and_bf16_gradients_are_clipped(four_ranks, norm_type):
    for norm, exact, after in four_ranks.run(norm_and_clip, norm_type):
        assert isinstance(norm, float)
        assert norm == pytest.approx(exact, rel=1e-6)
        assert after == pytest.approx(1.0, rel=2**-8)


def local_parts():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
    local = nemo.to_local_if_dtensor(sharded)
    return type(local) is torch.Tensor, local.requires_grad, local.tolist(), dist.get_rank()


def test_local_parts_are_plain_and_outside_autograd(two_ranks):
    assert two_ranks.run(local_parts) == [(True, False, [0.0, 1.0], 0), (True, False, [2.0, 3.0], 1)]
    plain = torch.ones(2)
    assert nemo.to_local_if_dtensor(plain) is plain
    assert not isinstance(plain, DTensor)


@pytest.mark.parametrize("norm", [math.nan, torch.tensor(math.nan)])
def test_a_norm_that_is_not_a_number_leaves_gradients_alone(norm):
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.tensor([3.0, 4.0])
    nemo.clip_grad_by_total_norm_([weight], 1.0, norm)
    assert weight.grad.tolist() == [3.0, 4.0]


def test_an_id_outside_the_vocabulary_is_refused_and_the_ignored_one_scores_zero():
    with pytest.raises(rl_logprobs.errors.TargetError):
        nemo.get_logprobs_from_vocab_parallel_logits(torch.zeros(1, 3, 4), torch.tensor([[0, 4, 0]]))
    found = nemo.get_logprobs_from_vocab_parallel_logits(torch.zeros(1, 3, 4), torch.tensor([[0, -100, 0]]))
    assert found[0, 0] == 0
