"""Log-probabilities of vocabulary-sharded logits: every split gives the single-process answer."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from harness.ranks import RanksFailed
from rl_logprobs import VocabShard, token_logprobs, token_statistics

TOKENS = (2, 6)


def full_logits(vocab, dtype=torch.float64):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(*TOKENS, vocab, generator=generator, dtype=torch.float64) * 4).to(dtype)
    targets = torch.randint(0, vocab, TOKENS, generator=generator)
    targets[1, 2] = -100
    if vocab > 8:
        logits[0, 0, : vocab // 2 + 3] = -math.inf  # one full shard of -inf at tp = 2 and 4
        logits[0, 1] = 1e4
        logits[0, 2, 0] = -1e4
        targets[0, 0] = vocab - 1
    return logits, targets


def loss_of(found):
    weights = torch.linspace(-1, 1, found.logprobs.numel(), dtype=found.logprobs.dtype).view(found.logprobs.shape)
    return (found.logprobs * weights + found.entropy * weights.square() + found.logsumexp * 0.1).sum()


def everything(logits, targets, **options):
    """Statistics, and the gradient of a loss over all of them, as plain tensors."""
    found = token_statistics(logits, targets, entropy=True, **options)
    (gradient,) = torch.autograd.grad(loss_of(found), logits)
    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return [found.logprobs.detach(), found.logsumexp.detach(), found.entropy.detach(), gradient]


def on_mesh(tp, vocab, dtype):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    logits, targets = full_logits(vocab, dtype)
    sharded = distribute_tensor(logits, mesh, [Replicate(), Shard(2)]).requires_grad_()
    return everything(sharded, targets, temperature=0.9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 97, 130])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_split_of_every_vocabulary_agrees_with_one_process(four_ranks, tp, vocab, dtype):
    logits, targets = full_logits(vocab, dtype)
    expected = everything(logits.requires_grad_(), targets, temperature=0.9)
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 2e-6}[dtype]
    for found in four_ranks.run(on_mesh, tp, vocab, dtype):
        for actual, desired in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(actual, desired, rtol=tolerance, atol=tolerance)
        rounding = 2**-7 if dtype is torch.bfloat16 else 1e-12
        torch.testing.assert_close(found[3], expected[3], rtol=rounding, atol=1e-12)


def winners(vocab, device_mesh_shape):
    mesh = init_device_mesh("cpu", device_mesh_shape, mesh_dim_names=("dp", "tp"))
    logits, targets = full_logits(vocab)
    logits = logits.round()  # many ties
    sharded = distribute_tensor(logits, mesh, [Replicate(), Shard(2)])
    with CommDebugMode() as counter:
        found = token_statistics(sharded, targets, argmax=True, target_rank=True)
    chosen = logits.gather(-1, targets.clamp(min=0)[..., None])
    kept = targets != -100
    return (
        (found.argmax, found.target_rank),
        (logits.argmax(-1) * kept, (logits > chosen).sum(-1) * kept),
        counter.get_total_counts(),
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_argmax_is_the_lowest_id_of_a_tie_and_rank_counts_all_columns_on_every_split(four_ranks, tp):
    for found, expected, collectives in four_ranks.run(winners, 97, (4 // tp, tp)):
        assert all(map(torch.equal, found, expected))
        assert collectives == (2 if tp > 1 else 0)  # the targets' logits, which one rank alone knows; the sums


def overwritten(vocab, dtype):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    logits, targets = full_logits(vocab, dtype)
    gradients = []
    for inplace in (False, True):
        sharded = distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_()
        found = token_statistics(sharded * 1.0, targets, temperature=0.9, inplace_forward=inplace)
        gradients.append(torch.autograd.grad((found.logprobs - found.logsumexp * 0.1).sum(), sharded)[0].full_tensor())
    return gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 97])
def test_logits_overwritten_in_the_forward_pass_give_the_same_gradient(four_ranks, vocab, dtype):
    for gradients in four_ranks.run(overwritten, vocab, dtype):
        torch.testing.assert_close(*gradients, rtol=2**-7 if dtype is torch.bfloat16 else 1e-12, atol=1e-30)


def counted(vocab):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    logits, targets = full_logits(vocab)
    sharded = distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_()
    with CommDebugMode() as forward:
        loss = loss_of(token_statistics(sharded, targets, entropy=True, shift=True))
    with CommDebugMode() as backward:
        loss.backward()
    return forward.get_total_counts(), backward.get_total_counts()


def test_one_collective_forward_and_none_backward(two_ranks):
    assert two_ranks.run(counted, 130) == [(1, 0), (1, 0)]


def from_local_shards(vocab, padded_width):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    logits, targets = full_logits(vocab)
    width = padded_width or -(-vocab // ranks)
    padded = torch.full((*TOKENS, width * ranks), 30.0, dtype=logits.dtype)
    padded[..., :vocab] = logits
    columns = slice(rank * width, (rank + 1) * width if padded_width else min((rank + 1) * width, vocab))
    shard = padded[..., columns].clone().requires_grad_()
    return everything(shard, targets, shard=VocabShard(vocab, dist.group.WORLD))


@pytest.mark.parametrize("padded_width", [0, 33, 40])
def test_local_shards_in_chunks_or_padded_agree_with_one_process(four_ranks, padded_width):
    logits, targets = full_logits(130)
    expected = everything(logits.requires_grad_(), targets)
    results = four_ranks.run(from_local_shards, 130, padded_width)
    for found in results:
        for actual, desired in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(actual, desired, rtol=1e-12, atol=1e-12)
    gradient = torch.cat([found[3] for found in results], -1)
    torch.testing.assert_close(gradient[..., :130], expected[3], rtol=1e-12, atol=1e-12)
    assert (gradient[..., 130:] == 0).all()


def from_own_layout():
    rank = dist.get_rank()
    logits, targets = full_logits(97)
    bounds = [0, 10, 97]
    shard = logits[..., bounds[rank] : bounds[rank + 1]]
    return token_logprobs(shard, targets, shard=VocabShard(97, dist.group.WORLD, bounds[rank]))


def test_any_other_layout_is_served_by_naming_the_first_column(two_ranks):
    logits, targets = full_logits(97)
    expected = token_logprobs(logits, targets)
    for found in two_ranks.run(from_own_layout):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def tokens_sharded(token_dim, shift, give):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    logits, targets = full_logits(97)
    placements = [Shard(token_dim), Shard(2)]
    sharded = distribute_tensor(logits, mesh, placements).requires_grad_()
    if give == "local":
        targets = targets.chunk(2, token_dim)[mesh.get_local_rank("cp")]
    elif give == "dtensor":
        targets = distribute_tensor(targets, mesh, [Shard(token_dim), Replicate()])
    logprobs = token_logprobs(sharded, targets, shift=shift)
    logprobs.square().sum().backward()
    return mesh.get_local_rank("cp"), logprobs.detach(), sharded.grad.full_tensor()


@pytest.mark.parametrize("token_dim", [0, 1])
@pytest.mark.parametrize(("shift", "give"), [(False, "full"), (False, "local"), (False, "dtensor"), (True, "full")])
def test_logits_sharded_over_tokens_and_vocabulary_give_each_rank_its_tokens(four_ranks, token_dim, shift, give):
    logits, targets = full_logits(97)
    expected = token_logprobs(logits.requires_grad_(), targets, shift=shift)
    (gradient,) = torch.autograd.grad(expected.square().sum(), logits)
    for cp, found, found_gradient in four_ranks.run(tokens_sharded, token_dim, shift, give):
        torch.testing.assert_close(found, expected.chunk(2, token_dim)[cp].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-12, atol=1e-12)


def badly_placed(case):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    logits, targets = full_logits(97)
    options = {}
    if case == "partial":
        logits = DTensor.from_local(logits, mesh, [Replicate(), Partial()])
    elif case == "two axes":
        logits = distribute_tensor(logits, mesh, [Shard(2), Shard(2)])
    elif case == "group with a DTensor":
        logits, options = (
            distribute_tensor(logits, mesh, [Replicate(), Shard(2)]),
            {"shard": VocabShard(97, mesh.get_group("tp"))},
        )
    elif case == "shape left out":
        local = distribute_tensor(logits, mesh, [Replicate(), Shard(2)]).to_local()
        logits = DTensor.from_local(
            local[..., :-1], mesh, [Replicate(), Shard(2)], shape=logits.shape, stride=(1, 1, 1)
        )
    elif case == "targets elsewhere":
        logits = distribute_tensor(logits, mesh, [Replicate(), Shard(2)])
        targets = distribute_tensor(targets, mesh, [Shard(1), Replicate()])
    elif case == "shift over ranks":
        logits = distribute_tensor(logits, mesh, [Shard(1), Shard(2)])
        targets, options = targets.chunk(2, 1)[mesh.get_local_rank("dp")], {"shift": True}
    elif case == "start beyond the vocabulary":
        logits, options = logits[..., :49], {"shard": VocabShard(97, mesh.get_group("tp"), start=98)}
    elif case == "strided":
        logits = DTensor.from_local(
            logits[..., ::4], mesh, [_StridedShard(2, split_factor=2), Shard(2)], run_check=False
        )
    elif case == "target too large":
        logits, targets = distribute_tensor(logits, mesh, [Replicate(), Shard(2)]), targets + 97
    elif case == "temperature":
        logits, options = distribute_tensor(logits, mesh, [Replicate(), Shard(2)]), {"temperature": -1.0}
    elif case == "no tokens":
        logits, targets = distribute_tensor(logits[:, :0], mesh, [Replicate(), Shard(2)]), targets[:, :0]
    elif case == "integer logits":
        logits = distribute_tensor(logits.nan_to_num().long(), mesh, [Replicate(), Shard(2)])
    elif case == "narrow shard":
        logits, options = logits[..., :30], {"shard": VocabShard(97, mesh.get_group("tp"))}
    with CommDebugMode() as counter:
        try:
            token_logprobs(logits, targets, **options)
        finally:
            assert counter.get_total_counts() == 0


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("partial", "PlacementError", "partial sum over mesh dim 1"),
        ("two axes", "PlacementError", "over 2 mesh dims"),
        ("group with a DTensor", "OptionError", "leave the group out"),
        ("shape left out", "ShapeError", "full shape"),
        ("targets elsewhere", "PlacementError", "place them likewise"),
        ("shift over ranks", "ShapeError", "full sequence of 6"),
        ("start beyond the vocabulary", "ShapeError", "start must be an integer in [0, 97]"),
        ("narrow shard", "ShapeError", "30 columns"),
        ("strided", "PlacementError", "in strides"),
        ("target too large", "TargetError", "outside [0, 97)"),
        ("temperature", "OptionError", "-1.0"),
        ("no tokens", "ShapeError", "at least one token"),
        ("integer logits", "DtypeError", "floating point"),
    ],
)
def test_misplaced_input_is_refused_on_every_rank_before_any_collective(four_ranks, case, error, message):
    with pytest.raises(RanksFailed) as caught:
        four_ranks.run(badly_placed, case)
    assert len(caught.value.errors) == 4
    for failure in caught.value.errors.values():
        assert failure.type_name == error, failure.traceback
        assert message in failure.message
