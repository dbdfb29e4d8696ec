"""Log-probabilities from hidden states: those of the logits, without the logits."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import rl_logprobs
from harness.pairwise import alternating_first
from harness.ranks import RanksFailed
from rl_logprobs import VocabShard, linear_token_logprobs, linear_token_statistics, token_statistics
from rl_logprobs.softmax import fused_linear

FEATURES = 6
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled and capped": {"logit_scale": 1.3, "softcap": 4.0, "temperature": 0.8, "bias": True},
}


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(fused_linear, "CPU_TILE", (4, 5))


def problem(vocab, dtype=torch.float64, tokens=(2, 7)):
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(*tokens, FEATURES, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, FEATURES, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, tokens, generator=generator)
    targets[0, 1] = -100
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets


def through_logits(hidden, weight, targets, *, bias=None, logit_scale=1.0, softcap=None, **options):
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) * logit_scale
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    return token_statistics(logits, targets, **options)


def options_of(name, bias):
    options = dict(HEADS[name])
    return {**options, "bias": bias} if options.pop("bias", False) else options


def loss_of(found):
    weights = torch.linspace(-1, 1, found.logprobs.numel(), dtype=found.logprobs.dtype).view(found.logprobs.shape)
    loss = (found.logprobs * weights).sum() + 0.1 * found.logsumexp.square().sum()
    return loss if found.entropy is None else loss + found.entropy.square().sum()


def values_and_gradients(function, inputs, *arguments, **options):
    leaves = [x.clone().requires_grad_() for x in inputs]
    bias = {"bias": leaves[2]} if len(leaves) == 3 else {}
    found = function(leaves[0], leaves[1], *arguments, **bias, **options)
    loss_of(found).backward()
    return [found.logprobs.detach(), found.logsumexp.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients_are_those_of_the_logits(small_tiles, name, entropy):
    hidden, weight, bias, targets = problem(13)
    options = options_of(name, bias)
    inputs = [hidden, weight, options.pop("bias")] if "bias" in options else [hidden, weight]
    actual = values_and_gradients(linear_token_statistics, inputs, targets, entropy=entropy, **options)
    desired = values_and_gradients(through_logits, inputs, targets, entropy=entropy, **options)
    for one, other in zip(actual, desired, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.any_torch
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "bias")), "scaled and capped"]
)
def test_gradients_are_the_derivatives(small_tiles, name):
    hidden, weight, bias, targets = problem(8, tokens=(1, 5))
    options = options_of(name, bias.requires_grad_())

    def statistics(*inputs):
        given = {**options, "bias": inputs[2]} if "bias" in options else options
        found = linear_token_statistics(*inputs[:2], targets, entropy=True, **given)
        return found.logprobs, found.logsumexp, found.entropy

    assert torch.autograd.gradcheck(statistics, (hidden.requires_grad_(), weight.requires_grad_(), bias))


class Watch(TorchDispatchMode):
    """The largest tensor that any operation makes, and the number of products."""

    def __init__(self):
        super().__init__()
        self.largest = self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm)
        return out


@pytest.mark.parametrize("name", HEADS)
def test_a_frozen_head_costs_no_product_backward_and_gives_the_same_gradient(small_tiles, name):
    hidden, weight, bias, targets = problem(13)
    hidden[1, 3], targets[1, 3] = math.nan, -100
    options = options_of(name, bias)
    gradients = []
    for frozen in (False, True):
        leaf = hidden.clone().requires_grad_()
        found = linear_token_statistics(leaf, weight.clone().requires_grad_(not frozen), targets, **options)
        with Watch() as watch:
            loss_of(found).backward()
        assert (watch.products == 0) is frozen
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert (gradients[1][1, 3] == 0).all()


def test_no_tensor_of_tokens_times_vocabulary_exists(monkeypatch):
    monkeypatch.setattr(fused_linear, "CPU_TILE", (16, 32))
    hidden, weight, _, targets = problem(100, tokens=(2, 40))
    with Watch() as watch:
        found = linear_token_statistics(hidden.requires_grad_(), weight.requires_grad_(), targets, entropy=True)
        loss_of(found).backward()
    assert watch.largest == max(hidden.numel(), weight.numel())


def test_bf16_inputs_keep_float32_accuracy():
    hidden, weight, _, targets = problem(1000, torch.bfloat16, tokens=(3, 40))
    exact = through_logits(hidden.double(), weight.double(), targets)
    found = linear_token_logprobs(hidden, weight, targets)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact.logprobs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kept_tokens", [None, [list(range(11))] * 14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(small_tiles, dtype, kept_tokens):
    hidden, weight, bias, targets = problem(11, dtype)
    options = {} if kept_tokens is None else {"kept_tokens": rl_logprobs.KeptTokens.from_rows(kept_tokens)}
    expected = values_and_gradients(linear_token_statistics, (hidden, weight, bias), targets, **options)
    with torch.autocast("cpu", torch.bfloat16):
        found = values_and_gradients(linear_token_statistics, (hidden, weight, bias), targets, **options)
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(actual, wanted)


def test_weight_gradient_is_rounded_once_whatever_the_tiles(monkeypatch):
    hidden, weight, _, targets = problem(40, torch.bfloat16, tokens=(8, 64))
    exact = values_and_gradients(through_logits, [hidden.double(), weight.double()], targets)
    for tile in ((7, 9), (64, 16), (1024, 1024)):
        monkeypatch.setattr(fused_linear, "CPU_TILE", tile)
        found = values_and_gradients(linear_token_statistics, [hidden, weight], targets)
        for actual, desired in zip(found[2:], exact[2:], strict=True):
            assert actual.dtype is torch.bfloat16
            torch.testing.assert_close(actual.double(), desired, rtol=2**-8, atol=1e-5)


def test_ignored_tokens_with_nan_states_do_not_reach_any_gradient():
    hidden, weight, bias, targets = problem(13)
    hidden[0, 1] = math.nan
    found = values_and_gradients(linear_token_statistics, [hidden, weight, bias], targets)
    assert all(value.isfinite().all() for value in found)
    assert (found[2][0, 1] == 0).all()


def test_padded_rows_of_the_head_have_no_probability_and_no_gradient():
    hidden, weight, _, targets = problem(16)
    targets = targets.clamp(max=10)
    sliced = values_and_gradients(linear_token_statistics, [hidden, weight[:11]], targets)
    padded = values_and_gradients(linear_token_statistics, [hidden, weight], targets, shard=VocabShard(11))
    torch.testing.assert_close(padded[:3], sliced[:3], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(padded[3][:11], sliced[3], rtol=1e-12, atol=1e-12)
    assert (padded[3][11:] == 0).all()


def test_argmax_is_the_lowest_of_the_most_probable_tokens(small_tiles):
    hidden, weight, _, targets = problem(30)
    hidden, weight = hidden.round(), weight.round()  # small integers: equal products are exactly equal
    weight[17] = weight[3] = 9.0
    hidden[0, 0] = 1.0
    found = linear_token_statistics(hidden, weight, targets, argmax=True).argmax
    assert found[0, 0] == 3
    assert torch.equal(found, (hidden @ weight.T).argmax(-1) * (targets != -100))


def on_mesh(tp, vocab, form, dtype):
    """Values and full gradients with hidden in one of its forms and the head sharded over ``tp`` ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    hidden, weight, bias, targets = problem(vocab, dtype)
    where = mesh["tp"]
    hidden.requires_grad_()
    states, options = hidden, {"entropy": True, "temperature": 0.9, "softcap": 5.0}
    if form == "local shards":
        rows = torch.arange(vocab).chunk(tp)
        rows = rows[mesh.get_local_rank("tp")] if mesh.get_local_rank("tp") < len(rows) else rows[0][:0]
        weight, bias = weight[rows].requires_grad_(), bias[rows].requires_grad_()
        options |= {"shard": VocabShard(vocab, mesh.get_group("tp"))}
    else:
        weight = distribute_tensor(weight, where, [Shard(0)]).requires_grad_()
        bias = distribute_tensor(bias, where, [Shard(0)]).requires_grad_()
        if form == "replicated":
            states = distribute_tensor(hidden, where, [Replicate()])
        elif form == "sequence-parallel":
            states = distribute_tensor(hidden, where, [Shard(1)])
        elif form == "2-D mesh":
            states = distribute_tensor(hidden, mesh, [Replicate(), Shard(1)])
        states.requires_grad_()
    with CommDebugMode() as forward:
        found = linear_token_statistics(states, weight, targets, bias=bias, **options)
    with CommDebugMode() as backward:
        gradients = torch.autograd.grad(loss_of(found), [states, weight, bias])
    full = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    counts = forward.get_total_counts(), backward.get_total_counts()
    return [found.logprobs.detach(), found.entropy.detach(), *full], counts


FORMS = ["plain", "local shards", "replicated", "sequence-parallel", "2-D mesh"]


@pytest.mark.parametrize(("split", "form"), alternating_first([(1, 97), (2, 97), (4, 130), (4, 5)], FORMS))
def test_every_split_agrees_with_one_process(four_ranks, split, form):
    tp, vocab = split
    hidden, weight, bias, targets = problem(vocab)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    found = through_logits(*leaves[:2], targets, bias=leaves[2], entropy=True, temperature=0.9, softcap=5.0)
    expected = [found.logprobs.detach(), found.entropy.detach(), *torch.autograd.grad(loss_of(found), leaves)]
    results = four_ranks.run(on_mesh, tp, vocab, form, torch.float64)
    if form == "local shards":
        first = [values for values, _ in results[:tp]]
        joined = [torch.cat([values[i] for values in first]) for i in (3, 4)]
        results = [([*values[:3], *joined], counts) for values, counts in results]
    for values, _ in results:
        for actual, desired in zip(values, expected, strict=True):
            torch.testing.assert_close(actual, desired, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("form", "expected"),
    [("plain", (1, 1)), ("local shards", (1, 1)), ("replicated", (1, 1)), ("sequence-parallel", (2, 1))],
)
def test_one_collective_forward_and_one_for_the_hidden_gradient_backward(two_ranks, form, expected):
    for _, counts in two_ranks.run(on_mesh, 2, 97, form, torch.float64):
        assert counts == expected


class Tied(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embedding = nn.Embedding(vocab, FEATURES)
        self.block = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.block(self.embedding(ids)).tanh()


def trained_under_fsdp(tied):
    torch.manual_seed(0)
    model, single = Tied(96), Tied(96)
    if not tied:
        for module in (model, single):
            module.head.weight = nn.Parameter(torch.linspace(-1, 1, 96 * FEATURES).view(96, FEATURES))
    single.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    if not tied:
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel()})
    fully_shard(model.block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    ids = torch.randint(0, 96, (4, 5))
    local_ids = ids.chunk(2)[mesh.get_local_rank("dp_shard")]
    (-linear_token_logprobs(model(local_ids), model.head.weight, local_ids, shift=True).mean()).backward()
    (-linear_token_logprobs(single(ids), single.head.weight, ids, shift=True).mean()).backward()
    expected = dict(single.named_parameters())
    return [(p.grad.full_tensor(), expected[name].grad) for name, p in model.named_parameters()]


@pytest.mark.parametrize("tied", [False, True])
def test_fsdp_heads_train_as_in_one_process(four_ranks, tied):
    for pairs in four_ranks.run(trained_under_fsdp, tied):
        assert len(pairs) == (3 if tied else 4)
        for actual, desired in pairs:
            torch.testing.assert_close(actual, desired, rtol=1e-5, atol=1e-7)


def badly_placed(case):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    hidden, weight, bias, targets = problem(97)
    options = {}
    if case == "fsdp shard":
        weight = distribute_tensor(weight, mesh, [Shard(0), Shard(0)])
    elif case == "sharded features of the head":
        weight = distribute_tensor(weight, mesh, [Replicate(), Shard(1)])
    else:
        weight = distribute_tensor(weight, mesh, [Replicate(), Shard(0)])
    if case == "sharded features":
        hidden = distribute_tensor(hidden, mesh, [Shard(2), Replicate()])
    elif case == "other mesh":
        hidden = distribute_tensor(hidden, mesh["dp"], [Replicate()])
    elif case == "bias placed otherwise":
        options["bias"] = distribute_tensor(bias, mesh, [Replicate(), Replicate()])
    with CommDebugMode() as counter:
        try:
            linear_token_logprobs(hidden, weight, targets, **options)
        finally:
            assert counter.get_total_counts() == 0


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("fsdp shard", "module.unshard()"),
        ("sharded features of the head", "shard"),
        ("sharded features", "all features"),
        ("other mesh", "which hidden's mesh"),
        ("bias placed otherwise", "the same placements"),
    ],
)
def test_misplaced_input_is_refused_on_every_rank_before_any_collective(four_ranks, case, message):
    with pytest.raises(RanksFailed) as caught:
        four_ranks.run(badly_placed, case)
    assert len(caught.value.errors) == 4
    for failure in caught.value.errors.values():
        assert failure.type_name == "PlacementError", failure.traceback
        assert message in failure.message


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda h, w, b: (h[0, 0], w, {}), rl_logprobs.errors.ShapeError, "tokens, features"),
        (lambda h, w, b: (h, w[:, 1:], {}), rl_logprobs.errors.ShapeError, r"\[vocab, 6\].*\(13, 5\)"),
        (lambda h, w, b: (h, w, {"bias": b[1:]}), rl_logprobs.errors.ShapeError, r"bias \(12,\)"),
        (lambda h, w, b: (h, w.long(), {}), rl_logprobs.errors.DtypeError, "weight must be floating"),
        (lambda h, w, b: (h, w, {"softcap": 0.0}), rl_logprobs.errors.OptionError, "softcap.*0.0"),
        (lambda h, w, b: (h, w, {"logit_scale": math.inf}), rl_logprobs.errors.OptionError, "logit_scale.*inf"),
        (lambda h, w, b: (h, w[:10], {}), rl_logprobs.errors.TargetError, r"\[0, 10\)"),
    ],
)
def test_bad_input_is_named(change, error, message):
    hidden, weight, bias, targets = problem(13)
    targets[0, 0] = 12
    hidden, weight, options = change(hidden, weight, bias)
    with pytest.raises(error, match=message):
        linear_token_logprobs(hidden, weight, targets, **options)
