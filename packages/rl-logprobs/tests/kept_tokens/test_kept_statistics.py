"""Statistics over kept sets: those of the softmax of masked logits, with gradients into kept columns only."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import rl_logprobs
from rl_logprobs import (
    KeptTokens,
    SamplingFilter,
    VocabShard,
    linear_token_logprobs,
    linear_token_statistics,
    sampling_mask,
    sequence_shard,
    token_kl,
    token_logprobs,
    token_statistics,
)
from rl_logprobs.distillation import kept_logprobs
from rl_logprobs.kept_tokens import kept_logits as kept_rows

FEATURES = 6


def problem(vocab, dtype=torch.float64, tokens=(2, 6), seed=0, unscored=3):
    """Logits, targets and kept sets of random sizes that contain the targets; some targets are not scored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*tokens, vocab, generator=generator, dtype=torch.float64) * 3
    chosen = torch.rand(*tokens, vocab, generator=generator) < torch.rand(*tokens, 1, generator=generator)
    targets = torch.randint(0, vocab, tokens, generator=generator)
    kept = chosen.scatter(-1, targets.unsqueeze(-1), True)
    targets.view(-1)[torch.randperm(targets.numel(), generator=generator)[:unscored]] = -100
    kept &= (targets != -100).unsqueeze(-1)
    order = torch.rand(kept.shape, generator=generator).masked_fill(~kept, 2).argsort(-1)  # kept ids in any order
    kept_tokens = KeptTokens.from_padded(order, kept.sum(-1))
    return logits.to(dtype), targets, kept, kept_tokens


def masked(logits, kept, targets):
    """The same distributions for a softmax over the vocabulary; those that are not scored keep all."""
    return logits.masked_fill(~kept & (targets != -100).unsqueeze(-1), -math.inf)


def loss_of(found):
    return found.logprobs.sin().sum() + 0.1 * found.logsumexp.square().sum() + found.entropy.square().sum()


@settings(max_examples=60)
@given(
    vocab=st.integers(1, 40),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    temperature=st.sampled_from([1.0, 0.6, "per token"]),
    inplace=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_statistics_and_gradients_are_those_of_the_masked_softmax(vocab, dtype, temperature, inplace, seed):
    logits, targets, kept, kept_tokens = problem(vocab, dtype, seed=seed)
    if temperature == "per token":
        temperature = torch.linspace(0.5, 2, 12, dtype=torch.float64).view(2, 6)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    options = {"entropy": True, "argmax": True, "target_rank": True, "temperature": temperature}
    view = leaf.view(2, 6, vocab) * 1  # not a leaf, so that its memory may be overwritten
    found = token_statistics(view, targets, kept_tokens=kept_tokens, inplace_backward=inplace, **options)
    expected = token_statistics(masked(exact, kept, targets), targets, **options)
    tolerance = 1e-11 if dtype is torch.float64 else 2e-6
    for name in ("logprobs", "logsumexp", "entropy"):
        ours = getattr(found, name).double()
        torch.testing.assert_close(ours, getattr(expected, name), rtol=tolerance, atol=tolerance)
    assert torch.equal(found.argmax, expected.argmax)
    assert torch.equal(found.target_rank, expected.target_rank)
    loss_of(found).backward()
    loss_of(expected).backward()
    rounding = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=rounding, atol=rounding)
    assert (leaf.grad[~kept] == 0).all()


def test_gradients_are_the_derivatives():
    logits, targets, _, kept_tokens = problem(9, tokens=(1, 5), unscored=1)

    def statistics(logits):
        found = token_statistics(logits, targets, kept_tokens=kept_tokens, entropy=True, temperature=0.7)
        return found.logprobs, found.logsumexp, found.entropy

    assert torch.autograd.gradcheck(statistics, logits.requires_grad_())
    assert torch.autograd.gradcheck(lambda x: kept_logprobs(x, kept_tokens), logits)
    other = (logits.detach() * 0.5).requires_grad_()
    mask = targets != -100
    assert torch.autograd.gradcheck(lambda x, y: token_kl(x, y, kept_tokens=kept_tokens, mask=mask), (logits, other))


def test_columns_outside_the_kept_sets_do_not_matter_whatever_they_hold():
    logits, targets, kept, kept_tokens = problem(20)
    spoilt = logits.masked_fill(~kept, math.nan).requires_grad_()
    found = token_logprobs(spoilt, targets, kept_tokens=kept_tokens)
    assert torch.equal(found, token_logprobs(logits, targets, kept_tokens=kept_tokens))
    (gradient,) = torch.autograd.grad(found.sum(), spoilt)
    assert (gradient[~kept] == 0).all()
    assert gradient.isfinite().all()


def test_a_kept_id_that_the_model_excludes_has_probability_0():
    logits = torch.tensor([[-math.inf, 1.0, 1.0, 9.0]], requires_grad=True)
    kept_tokens = KeptTokens.from_rows([[0, 1, 2]])
    found = token_statistics(logits, torch.tensor([1]), kept_tokens=kept_tokens, entropy=True)
    torch.testing.assert_close(found.logprobs.exp(), torch.tensor([0.5]))
    torch.testing.assert_close(found.entropy, torch.tensor([math.log(2)]))
    excluded = token_logprobs(logits, torch.tensor([0]), kept_tokens=kept_tokens)
    assert excluded.item() == -math.inf
    (gradient,) = torch.autograd.grad(excluded.sum() + found.entropy.sum(), logits)
    assert gradient.isfinite().all()


def test_no_scored_token_gives_zeros_that_can_be_differentiated():
    logits = torch.randn(2, 3, requires_grad=True)
    found = token_logprobs(logits, torch.full((2,), -100), kept_tokens=KeptTokens.from_rows([[], []]))
    found.sum().backward()
    assert (found == 0).all()
    assert (logits.grad == 0).all()


def test_the_divergence_is_that_of_the_two_renormalised_distributions():
    logits, targets, kept, kept_tokens = problem(17)
    reference, mask = logits.flip(-1) * 0.7, targets != -100
    found = token_kl(logits, reference, kept_tokens=kept_tokens, mask=mask, temperature=0.8)
    expected = token_kl(masked(logits, kept, targets), masked(reference, kept, targets), mask=mask, temperature=0.8)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (token_kl(logits, logits.clone(), kept_tokens=kept_tokens, mask=mask) == 0).all()
    never = reference.masked_fill(kept & (torch.arange(17) % 2 == 0), -math.inf)
    infinite = token_kl(logits, never, kept_tokens=kept_tokens, mask=mask)
    assert torch.equal(infinite == math.inf, (kept[..., ::2].any(-1)) & mask)


def test_the_log_probabilities_of_a_kept_set_add_up_to_one_and_contain_the_targets():
    logits, targets, kept, kept_tokens = problem(17)
    found = kept_logprobs(logits, kept_tokens, temperature=0.8)
    sums = torch.zeros(12, dtype=torch.float64).index_add(0, kept_tokens.rows(), found.exp())
    torch.testing.assert_close(sums, kept.any(-1).flatten().double(), rtol=1e-12, atol=0)
    scored = token_logprobs(logits, targets, kept_tokens=kept_tokens, temperature=0.8).flatten()
    of_target = kept_tokens.ids == targets.flatten()[kept_tokens.rows()]
    torch.testing.assert_close(found[of_target], scored[targets.flatten() != -100], rtol=0, atol=0)


def through_logits(hidden, weight, targets, kept, *, bias=None, logit_scale=1.0, softcap=None, **options):
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) * logit_scale
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    return token_statistics(masked(logits, kept, targets), targets, entropy=True, argmax=True, **options)


def head_problem(vocab, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    _, targets, kept, kept_tokens = problem(vocab, seed=seed)
    hidden = torch.randn(2, 6, FEATURES, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, FEATURES, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)], targets, kept, kept_tokens


@pytest.mark.parametrize("method", ["entry", "token"])
@pytest.mark.parametrize("form", [{}, {"logit_scale": 1.3, "softcap": 4.0, "temperature": 0.8}])
@pytest.mark.parametrize("vocab", [1, 13, 40])
def test_hidden_states_give_the_statistics_and_gradients_of_the_logits(monkeypatch, method, form, vocab):
    monkeypatch.setattr(kept_rows, "cheaper_method", lambda *_: method)
    monkeypatch.setattr(kept_rows, "CPU_WORKSPACE", 5 * FEATURES)  # several spans
    leaves, targets, kept, kept_tokens = head_problem(vocab)
    found = linear_token_statistics(
        *leaves[:2], targets, bias=leaves[2], kept_tokens=kept_tokens, entropy=True, argmax=True, **form
    )
    expected = through_logits(*leaves[:2], targets, kept, bias=leaves[2], **form)
    for name in ("logprobs", "logsumexp", "entropy", "argmax"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(loss_of(found), leaves)
    for ours, theirs in zip(gradients, torch.autograd.grad(loss_of(expected), leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    never = ~kept.flatten(0, 1).any(0)
    assert (gradients[1][never] == 0).all()


@pytest.mark.parametrize("method", ["entry", "token"])
def test_hidden_states_that_are_not_scored_do_not_matter(monkeypatch, method):
    monkeypatch.setattr(kept_rows, "cheaper_method", lambda *_: method)
    leaves, targets, _, kept_tokens = head_problem(13)
    spoilt = leaves[0].detach().masked_fill((targets == -100).unsqueeze(-1), math.nan).requires_grad_()
    gradients = []
    for hidden in (leaves[0], spoilt):
        found = linear_token_logprobs(hidden, leaves[1], targets, kept_tokens=kept_tokens)
        gradients.append(torch.autograd.grad(found.square().sum(), (hidden, leaves[1])))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_bfloat16_heads_keep_float32_accuracy():
    leaves, targets, kept, kept_tokens = head_problem(40, torch.bfloat16)
    found = linear_token_logprobs(*leaves[:2], targets, kept_tokens=kept_tokens)
    exact = through_logits(leaves[0].double(), leaves[1].double(), targets, kept).logprobs
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def compared(found):
    return [found.logprobs.detach(), found.entropy.detach(), found.argmax]


def on_mesh(vocab):
    """Every sharded form in one call: statistics, gradients in full, and collectives forward and backward."""
    results = {}
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, group = world["tp"], world.get_group("tp")
    logits, targets, _, kept_tokens = problem(vocab)
    options = {"entropy": True, "argmax": True, "temperature": 0.9}

    def record(name, call, leaves, **more):
        with CommDebugMode() as forward:
            found = call(**options, **more)
        with CommDebugMode() as backward:
            gradients = torch.autograd.grad(loss_of(found), leaves)
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        results[name] = compared(found), full, (forward.get_total_counts(), backward.get_total_counts())

    for name, mesh, placements in [
        ("vocabulary", tp, [Shard(2)]),
        ("vocabulary, four ranks", init_device_mesh("cpu", (4,)), [Shard(2)]),
        ("vocabulary and sequence", world, [Shard(1), Shard(2)]),
        ("replicated", tp, [Replicate()]),
    ]:
        leaf = distribute_tensor(logits, mesh, placements).requires_grad_()
        record(name, token_statistics, [leaf], logits=leaf, targets=targets, kept_tokens=kept_tokens)
    chunk = -(-vocab // 2)
    start = tp.get_local_rank() * chunk
    local = logits[..., start : start + chunk].clone().requires_grad_()
    shard = {"logits": local, "shard": VocabShard(vocab, group)}
    record("local shard", token_statistics, [local], targets=targets, kept_tokens=kept_tokens, **shard)

    permutation = torch.tensor([0, 5, 1, 4, 2, 3])
    rows = sequence_shard(torch.arange(12).view(2, 6), permutation, group)
    leaf = logits[:, permutation.chunk(2)[tp.get_local_rank()]].clone().requires_grad_()
    mine = {"targets": sequence_shard(targets, permutation, group), "kept_tokens": kept_tokens.select(rows)}
    record("context parallel", token_statistics, [leaf], logits=leaf, **mine)

    (hidden, weight, bias), *_ = head_problem(vocab)
    for name, mesh, placements in [
        ("head, replicated tokens", tp, [Replicate()]),
        ("head, sequence-parallel tokens", tp, [Shard(1)]),
        ("head, two axes", world, [Replicate(), Shard(1)]),
    ]:
        for method in ("entry", "token"):
            kept_rows.cheaper_method, before = (lambda *_, method=method: method), kept_rows.cheaper_method
            states = distribute_tensor(hidden.detach(), mesh, placements).requires_grad_()
            head, offsets = (distribute_tensor(x.detach(), tp, [Shard(0)]).requires_grad_() for x in (weight, bias))
            operands = {
                "hidden": states,
                "weight": head,
                "bias": offsets,
                "targets": targets,
                "kept_tokens": kept_tokens,
            }
            record(f"{name}, {method}", linear_token_statistics, [states, head, offsets], **operands)
            kept_rows.cheaper_method = before
    return results


@pytest.mark.parametrize("vocab", [pytest.param(3, marks=pytest.mark.slow), 29])
def test_every_split_agrees_with_one_process_in_one_collective(four_ranks, vocab):
    logits, targets, kept, kept_tokens = problem(vocab)
    options = {"kept_tokens": kept_tokens, "entropy": True, "argmax": True, "temperature": 0.9}
    logits.requires_grad_()
    whole = token_statistics(logits, targets, **options)
    (gradient,) = torch.autograd.grad(loss_of(whole), logits)
    masked_whole = token_statistics(masked(logits, kept, targets), targets, entropy=True, temperature=0.9)
    torch.testing.assert_close(whole.logprobs, masked_whole.logprobs, rtol=1e-12, atol=1e-12)
    leaves, *_ = head_problem(vocab)
    linear = linear_token_statistics(*leaves[:2], targets, bias=leaves[2], **options)
    linear_gradients = torch.autograd.grad(loss_of(linear), leaves)
    chunk, permutation = -(-vocab // 2), torch.tensor([0, 5, 1, 4, 2, 3])
    for rank, results in enumerate(four_ranks.run(on_mesh, vocab)):
        for name, (statistics, gradients, counts) in results.items():
            expected = compared(linear if name.startswith("head") else whole)
            if name == "vocabulary and sequence":
                expected = [value[:, rank // 2 * 3 :][:, :3] for value in expected]
            if name == "context parallel":
                expected = [value[:, permutation.chunk(2)[rank % 2]] for value in expected]
            if name.startswith("head"):
                for ours, theirs in zip(statistics, expected, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
                for ours, theirs in zip(gradients, linear_gradients, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
                gathered = "replicated" not in name
                assert counts == (1 + gathered, 1), name
                continue
            for ours, theirs in zip(statistics, expected, strict=True):
                assert torch.equal(ours, theirs), name  # sums with zeros are exact
            full = gradient
            if name == "local shard":
                full = gradient[..., rank % 2 * chunk :][..., :chunk]
            if name == "context parallel":
                full = gradient[:, permutation.chunk(2)[rank % 2]]
            assert torch.equal(gradients[0], full), name
            assert counts == (name not in ("replicated", "context parallel"), 0), name


class Reads:
    """The elements of the head that products read, and the multiplications."""

    def __init__(self, monkeypatch):
        self.rows = self.multiplications = 0
        by_entry, product = torch.Tensor.index_select, kept_rows.wide_product

        def index_select(tensor, dim, index):
            self.rows += index.numel()
            self.multiplications += index.numel() * tensor.shape[1]
            return by_entry(tensor, dim, index)

        def wide_product(left, right, dtype):
            self.rows += right.shape[1]
            self.multiplications += left.shape[0] * right.shape[1] * left.shape[1]
            return product(left, right, dtype)

        monkeypatch.setattr(torch.Tensor, "index_select", index_select)
        monkeypatch.setattr(kept_rows, "wide_product", wide_product)


def test_small_sets_read_only_the_kept_rows_of_the_head_and_large_sets_none_twice(monkeypatch):
    tokens, vocab, features = 50, 4000, 8
    hidden, weight = torch.randn(tokens, features), torch.randn(vocab, features)
    targets = torch.zeros(tokens, dtype=torch.int64)
    for kept, rows, multiplications in [
        (3, 2 * 3 * tokens, 2 * 3 * tokens * features),  # the hidden states' rows are gathered too
        (3000, vocab, tokens * vocab * features),
    ]:
        reads = Reads(monkeypatch)
        kept_tokens = KeptTokens.from_padded(torch.arange(kept).expand(tokens, kept))
        linear_token_logprobs(hidden, weight, targets, kept_tokens=kept_tokens)
        assert (reads.rows, reads.multiplications) == (rows, multiplications)
        monkeypatch.undo()


@settings(max_examples=30)
@given(
    top_k=st.none() | st.integers(1, 30),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**16),
)
def test_recorded_sets_replay_the_filter_exactly(top_k, top_p, min_p, seed):
    logits, *_ = problem(25, seed=seed)
    sampling = SamplingFilter(top_k=top_k, top_p=top_p, min_p=min_p)
    kept_tokens = sampling_mask(logits, sampling, temperature=0.8)
    targets = rl_logprobs.sample_tokens(logits, seed=seed, temperature=0.8, sampling=sampling)
    found = token_logprobs(logits, targets, kept_tokens=kept_tokens, temperature=0.8)
    expected = token_logprobs(logits, targets, sampling=sampling, temperature=0.8)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def recorded_on_mesh():
    mesh = init_device_mesh("cpu", (4,))
    logits, *_ = problem(29)
    options = {"sampling": SamplingFilter(top_p=0.7), "temperature": 0.8}
    kept_tokens = sampling_mask(distribute_tensor(logits, mesh, [Shard(2)]), **options)
    return kept_tokens.ids, kept_tokens.offsets


def test_every_split_records_the_same_sets(four_ranks):
    expected = sampling_mask(problem(29)[0], SamplingFilter(top_p=0.7), temperature=0.8)
    for ids, offsets in four_ranks.run(recorded_on_mesh):
        assert torch.equal(ids, expected.ids)
        assert torch.equal(offsets, expected.offsets)


def test_a_target_outside_its_set_is_an_error_or_minus_infinity():
    logits, targets, _, kept_tokens = problem(9, unscored=0)
    targets[1, 2] = next(kept for kept in range(9) if kept not in kept_tokens.select(torch.tensor([8])).ids)
    with pytest.raises(
        rl_logprobs.errors.TargetError, match=f"1 of 12 .* target {targets[1, 2]} of token 8, which kept"
    ):
        token_logprobs(logits, targets, kept_tokens=kept_tokens)
    allowed = KeptTokens(kept_tokens.ids, kept_tokens.offsets, missing_target="-inf")
    logits.requires_grad_()
    found = token_logprobs(logits, targets, kept_tokens=allowed)
    assert (found == -math.inf).nonzero().tolist() == [[1, 2]]
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert (gradient[1, 2] == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kept_tokens": KeptTokens.from_rows([[1]] * 11)}, rl_logprobs.errors.ShapeError, "11 rows, .* need 12"),
        (
            {"kept_tokens": KeptTokens.from_rows([[1]] * 11 + [[]])},
            rl_logprobs.errors.KeptTokensError,
            "1 scored tokens .* token 11",
        ),
        (
            {"kept_tokens": KeptTokens.from_rows([[1]] * 11 + [[1, 9]])},
            rl_logprobs.errors.KeptTokensError,
            r"\[0, 9\).*9 of token 11",
        ),
        ({"sampling": SamplingFilter(top_k=2)}, rl_logprobs.errors.OptionError, "leave out sampling"),
    ],
)
def test_unfit_sets_are_named_with_their_numbers(change, error, message):
    logits, _, _, kept_tokens = problem(9)
    with pytest.raises(error, match=message):
        token_logprobs(logits, torch.ones(2, 6, dtype=torch.int64), **({"kept_tokens": kept_tokens} | change))
