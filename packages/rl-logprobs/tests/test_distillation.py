"""Log-probabilities at several ids: a student's for its teacher's most probable tokens, on every split."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import rl_logprobs
from harness.ranks import RanksFailed
from rl_logprobs import logprobs_at, token_logprobs, topk_logprobs

TOKENS = (2, 5)


def problem(vocab, k, dtype=torch.float64):
    generator = torch.Generator().manual_seed(vocab + k)
    logits = torch.randn(*TOKENS, vocab, generator=generator, dtype=torch.float64) * 4
    ids = torch.randint(0, vocab, (*TOKENS, k), generator=generator)
    logits[0, 0, : vocab // 2 + 1] = -math.inf  # a full shard of -inf at tp = 2 and 4
    ids[0, 0, 0], ids[0, 0, -1] = 0, vocab - 1
    ids[0, 1] = ids[0, 1, :1]  # the same id k times
    ids[1, 2], ids[1, 3, 0] = -100, -100
    return logits.to(dtype), ids


def exact(logits, ids, temperature=1.0):
    log_softmax = torch.log_softmax(logits.double() / temperature, -1)
    return log_softmax.gather(-1, ids.clamp(min=0)).masked_fill(ids == -100, 0)


def loss_of(logprobs):
    weights = torch.linspace(-1, 1, logprobs.numel(), dtype=logprobs.dtype).view(logprobs.shape)
    return (weights * torch.where(logprobs == -math.inf, 0, logprobs)).sum()


def value_and_gradient(function, logits):
    logprobs = function(logits.requires_grad_())
    (gradient,) = torch.autograd.grad(loss_of(logprobs), logits)
    return logprobs.detach(), gradient


@pytest.mark.parametrize("temperature", [0.7, torch.tensor([[0.5], [2.0]], dtype=torch.float64)])
def test_gradients_are_the_derivatives(temperature):
    logits, ids = problem(11, 3)
    logits[0, 0] = 1.0
    assert torch.autograd.gradcheck(lambda x: logprobs_at(x, ids, temperature=temperature), (logits.requires_grad_(),))


def test_one_id_a_position_is_its_token_logprob():
    logits, ids = problem(40, 1)
    at, alone = (
        value_and_gradient(f, logits)
        for f in (
            lambda x: logprobs_at(x, ids).squeeze(-1),
            lambda x: token_logprobs(x, ids.squeeze(-1)),
        )
    )
    assert torch.equal(at[0], alone[0])
    torch.testing.assert_close(at[1], alone[1], rtol=0, atol=1e-15)


def test_half_precision_gradient_is_the_float64_gradient_rounded_once():
    logits, ids = problem(257, 6, torch.bfloat16)
    logits[0, 0] = 1.0
    _, actual = value_and_gradient(lambda x: logprobs_at(x, ids), logits)
    _, reference = value_and_gradient(lambda x: exact(x, ids), logits.double())
    torch.testing.assert_close(actual.double(), reference, rtol=2**-8, atol=1e-7)


def test_ignored_positions_send_no_gradient_even_from_nan_logits():
    logits, ids = problem(20, 4)
    logits[1, 2] = math.nan
    logprobs, gradient = value_and_gradient(lambda x: logprobs_at(x, ids), logits)
    assert (logprobs[1, 2] == 0).all()
    assert logprobs[1, 3, 0] == 0
    assert (gradient[1, 2] == 0).all()
    assert gradient.isfinite().all()


def sharded(vocab, k, dtype):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    logits, ids = problem(vocab, k, dtype)
    shards = distribute_tensor(logits, mesh, [Shard(2)])
    with CommDebugMode() as collectives:
        logprobs, gradient = value_and_gradient(lambda x: logprobs_at(x, ids, temperature=0.8), shards)
    return logprobs, gradient.full_tensor(), collectives.get_total_counts()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "vocab"), [("two_ranks", 97), ("four_ranks", 5), ("four_ranks", 97)])
def test_every_split_agrees_with_one_process_in_one_collective(request, ranks, vocab, dtype):
    logits, ids = problem(vocab, 3, dtype)
    expected = exact(logits, ids, 0.8)
    _, gradient = value_and_gradient(lambda x: logprobs_at(x, ids, temperature=0.8), logits)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    for found, found_gradient, collectives in request.getfixturevalue(ranks).run(sharded, vocab, 3, dtype):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found_gradient, gradient, rtol=2**-7 if tolerance > 1e-9 else 1e-12, atol=1e-12)
        assert collectives == 1


def test_topk_logprobs_of_an_equal_student_give_no_loss_and_no_gradient():
    logits, _ = problem(13, 1)
    logits[0, 0] = 1.0
    teacher = topk_logprobs(logits, 13)
    student = logits.clone().requires_grad_()
    loss = (teacher.logprobs.exp() * (teacher.logprobs - logprobs_at(student, teacher.ids))).sum()
    loss.backward()
    torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-12)
    torch.testing.assert_close(student.grad, torch.zeros_like(student), rtol=0, atol=1e-14)


BAD_INPUT = {
    "no last dim": (lambda x, i: (x, i[..., 0], {}), rl_logprobs.errors.ShapeError, "last dim"),
    "no ids": (lambda x, i: (x, i[..., :0], {}), rl_logprobs.errors.ShapeError, "at least one id"),
    "other tokens": (lambda x, i: (x, i[:, 1:], {}), rl_logprobs.errors.ShapeError, "4, 3.*5, 3"),
    "float ids": (lambda x, i: (x, i.double(), {}), rl_logprobs.errors.DtypeError, "integer"),
    "id too large": (lambda x, i: (x, i + 20, {}), rl_logprobs.errors.TargetError, "outside"),
    "temperature": (lambda x, i: (x, i, {"temperature": 0.0}), rl_logprobs.errors.OptionError, "0.0"),
    "temperatures": (lambda x, i: (x, i, {"temperature": torch.ones(2, 5, 3)}), rl_logprobs.errors.ShapeError, "3"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_named(name):
    build, error, message = BAD_INPUT[name]
    logits, ids, options = build(*problem(20, 3))
    with pytest.raises(error, match=message):
        logprobs_at(logits, ids, **options)


def one_bad_id():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    logits, ids = problem(20, 3)
    logprobs_at(distribute_tensor(logits, mesh, [Shard(2)]), ids + 20)


def test_bad_input_raises_on_every_rank_before_any_collective(two_ranks):
    with pytest.raises(RanksFailed) as caught:
        two_ranks.run(one_bad_id, timeout=30)
    assert [error.type_name for error in caught.value.errors.values()] == ["TargetError"] * 2
