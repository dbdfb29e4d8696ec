"""Log-probabilities of one process: values, gradients, hard inputs and bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import rl_logprobs
from rl_logprobs import VocabShard, token_logprobs, token_statistics

IGNORED = -100


def batch(*shape, dtype=torch.float64, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    targets = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    return logits, targets


def reference(logits, targets, temperature=1.0):
    """Log-probabilities, log-sum-exp and entropy in float64 from the full logits."""
    scaled = logits.double() / temperature
    log_softmax = torch.log_softmax(scaled, -1)
    chosen = log_softmax.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = torch.special.entr(log_softmax.exp()).sum(-1)
    kept = targets != IGNORED
    return chosen * kept, scaled.logsumexp(-1) * kept, entropy * kept


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([[0.5], [2.0]], dtype=torch.float64)])
def test_gradients_are_the_derivatives_of_all_three_statistics(temperature):
    logits, targets = batch(2, 3, 11)
    targets[0, 1] = IGNORED

    def statistics(x):
        found = token_statistics(x, targets, entropy=True, temperature=temperature)
        return found.logprobs, found.logsumexp, found.entropy

    assert torch.autograd.gradcheck(statistics, (logits.requires_grad_(),))


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)]
)
def test_statistics_agree_with_float64_softmax(dtype, tolerance, temperature):
    logits, targets = batch(3, 5, 1031, dtype=dtype)
    found = token_statistics(logits, targets, entropy=True, temperature=temperature)
    for actual, desired in zip(
        (found.logprobs, found.logsumexp, found.entropy), reference(logits, targets, temperature), strict=True
    ):
        assert actual.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        torch.testing.assert_close(actual.double(), desired, rtol=tolerance, atol=tolerance)


def test_half_precision_gradient_is_the_float64_gradient_rounded_once():
    logits, targets = batch(4, 257, dtype=torch.bfloat16)
    actual, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    token_logprobs(actual, targets).sum().backward()
    reference(exact, targets)[0].sum().backward()
    torch.testing.assert_close(actual.grad.double(), exact.grad, rtol=2**-8, atol=1e-30)


HARD_ROWS = {
    "some -inf": torch.tensor([-math.inf, 1.0, 2.0, -math.inf, 0.5]),
    "one survivor": torch.tensor([-math.inf, -math.inf, 3.0, -math.inf, -math.inf]),
    "huge": torch.tensor([1e4, 1e4 - 1, -1e4, 0.0, 9999.5]),
    "all very negative": torch.tensor([-1e4, -1e4 - 3, -1e4 + 1, -1e4, -1e4]),
    "identical": torch.full((5,), 7.25),
    "zero": torch.zeros(5),
    "near overflow": torch.tensor([3e38, 1e38, -3e37, 0.0, 1.0]),
}


@pytest.mark.parametrize("name", HARD_ROWS)
def test_hard_logits_stay_within_a_few_ulp_of_float64(name):
    row = HARD_ROWS[name]
    logits = row.repeat(5, 1).requires_grad_()
    targets = torch.arange(5)
    exact = row.double().repeat(5, 1).requires_grad_()
    found = token_statistics(logits, targets, entropy=True)
    logprobs, logsumexp, entropy = reference(exact, targets)
    ulp = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=4 * ulp, atol=4 * ulp)
    torch.testing.assert_close(found.logsumexp.double(), logsumexp, rtol=2 * ulp, atol=0)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=4 * ulp, atol=4 * ulp)
    possible = row.isfinite()
    torch.where(possible, found.logprobs, 0).sum().backward()
    torch.where(possible, logprobs, 0).sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=8 * ulp, atol=8 * ulp)


def test_entropy_gradient_is_zero_at_impossible_tokens():
    logits = HARD_ROWS["some -inf"][None].clone().requires_grad_()
    token_statistics(logits, torch.tensor([1]), entropy=True).entropy.sum().backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[0, [0, 3]] == 0).all()


def test_ignored_tokens_are_zero_and_send_no_gradient_even_from_nan_logits():
    logits, targets = batch(4, 9)
    logits[1], targets[1] = math.nan, IGNORED
    logits[2], targets[2] = -math.inf, IGNORED
    logits.requires_grad_()
    found = token_statistics(logits, targets, entropy=True)
    (found.logprobs.sum() + found.entropy.sum() + found.logsumexp.sum()).backward()
    for value in (found.logprobs, found.logsumexp, found.entropy):
        assert (value[1:3] == 0).all()
    assert (logits.grad[1:3] == 0).all()
    assert (logits.grad[[0, 3]] != 0).any(-1).all()


def test_shift_scores_each_position_against_the_next_token():
    logits, ids = batch(2, 6, 13)
    shifted = token_logprobs(logits, ids, shift=True)
    torch.testing.assert_close(shifted[:, :-1], token_logprobs(logits[:, :-1], ids[:, 1:]))
    assert (shifted[:, -1] == 0).all()


def test_strided_logits_give_the_values_and_gradients_of_their_copy():
    logits, targets = batch(3, 7, 40)
    for view in (lambda x: x[:, 1:, 3:30], lambda x: x[::2, :, ::2], lambda x: x.transpose(0, 1)):
        strided = view(logits.clone().requires_grad_())
        copied = view(logits).clone().requires_grad_()
        chosen = (targets.new_ones(strided.shape[:-1]) * 5).contiguous()
        strided.retain_grad()
        for x in (strided, copied):
            token_logprobs(x, chosen).square().sum().backward()
        torch.testing.assert_close(strided.grad, copied.grad)


def test_padded_vocabulary_entries_have_no_probability_and_no_gradient():
    logits, targets = batch(5, 16)
    targets %= 11
    logits[:, 11:] = 50.0
    padded, sliced = logits.clone().requires_grad_(), logits[:, :11].clone().requires_grad_()
    actual, desired = token_logprobs(padded, targets, shard=VocabShard(11)), token_logprobs(sliced, targets)
    actual.sum().backward()
    desired.sum().backward()
    torch.testing.assert_close(actual, desired)
    torch.testing.assert_close(padded.grad[:, :11], sliced.grad)
    assert (padded.grad[:, 11:] == 0).all()


def test_logits_are_left_alone_unless_asked():
    logits, targets = batch(3, 8, 21, dtype=torch.bfloat16)
    before = logits.clone()
    token_logprobs(logits.requires_grad_(), targets).sum().backward()
    assert torch.equal(logits, before)


def test_inplace_backward_writes_the_same_gradient_over_the_logits():
    weight, targets = batch(6, 30, dtype=torch.float32)
    gradients = []
    for inplace in (False, True):
        leaf = weight.clone().requires_grad_()
        logits = leaf * 1.0
        token_logprobs(logits, targets, inplace_backward=inplace).sum().backward()
        gradients.append(leaf.grad)
        assert torch.equal(logits, leaf.grad) is inplace
    assert torch.equal(*gradients)


def test_inplace_backward_refuses_a_second_use_of_the_lost_logits():
    weight, targets = batch(6, 30, dtype=torch.float32)
    logits = weight.requires_grad_() * 1.0
    loss = token_logprobs(logits, targets, inplace_backward=True).sum() + logits.exp().log().square().sum()
    twice = token_logprobs(logits, targets).sum() + token_logprobs(logits, targets, inplace_backward=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + twice).backward()


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 1e-3)],
)
def test_inplace_forward_gives_the_gradient_of_the_logits_that_it_overwrites(dtype, tolerance):
    logits, targets = batch(4, 6, 30, dtype=dtype)
    logits[0, 1, :20], logits[2, 2], targets[1, 3] = -math.inf, math.nan, IGNORED
    targets[0, 1], targets[2, 2] = 25, IGNORED
    options = {"temperature": 0.8, "shard": VocabShard(29)}
    targets %= 29
    targets[1, 3] = targets[2, 2] = IGNORED
    statistics, gradients = [], []
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        given = leaf * 1.0
        found = token_statistics(given, targets, inplace_forward=inplace, **options)
        assert torch.equal(given.nan_to_num(), logits.nan_to_num()) is not inplace
        (found.logprobs * 3 - found.logsumexp.square() * 0.1).sum().backward()
        statistics.append(found)
        gradients.append(leaf.grad)
    assert torch.equal(statistics[0].logprobs, statistics[1].logprobs)
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=1e-6 if dtype is torch.float16 else 1e-30)


def test_inplace_forward_holds_no_second_tensor_of_the_logits_size():
    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != memory:
                self.bytes = max(self.bytes, out.untyped_storage().nbytes())
            return out

    weight, targets = batch(600, 1000, dtype=torch.float32)
    logits = weight.requires_grad_() * 1.0
    memory = logits.untyped_storage().data_ptr()
    with Largest() as largest:
        (gradient,) = torch.autograd.grad(token_logprobs(logits, targets, inplace_forward=True).sum(), logits)
    assert gradient.data_ptr() == memory
    assert largest.bytes < logits.nbytes / 100


def test_inplace_forward_leaves_logits_alone_that_need_no_gradient():
    logits, targets = batch(6, 30)
    before = logits.clone()
    token_logprobs(logits, targets, inplace_forward=True)
    with torch.no_grad():
        token_logprobs(logits.requires_grad_(), targets, inplace_forward=True)
    assert torch.equal(logits, before)


def test_inplace_forward_refuses_what_still_needs_the_logits():
    leaf, targets = batch(6, 30)
    logits = leaf.requires_grad_().exp()
    loss = token_logprobs(logits, targets, inplace_forward=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(rl_logprobs.errors.OptionError, match="use inplace_backward"):
        token_statistics(leaf, targets, entropy=True, inplace_forward=True)


def test_rank_counts_the_tokens_that_are_more_probable_than_the_target():
    logits = torch.tensor([[3.0, 1.0, 2.0, 1.0, -math.inf]]).repeat(6, 1)
    targets = torch.tensor([0, 1, 2, 3, 4, IGNORED])
    expected = [0, 2, 1, 2, 4, 0]
    for options in ({}, {"temperature": 2.0}, {"sampling": rl_logprobs.SamplingFilter(top_k=1)}, {"entropy": True}):
        assert token_statistics(logits, targets, target_rank=True, **options).target_rank.tolist() == expected
    assert token_statistics(logits[:3], targets[:3], target_rank=True, shard=VocabShard(3)).target_rank.tolist() == [
        0,
        2,
        1,
    ]
    assert token_statistics(logits, targets).target_rank is None


def test_no_graph_is_kept_without_grad():
    logits, targets = batch(3, 8)
    with torch.no_grad():
        assert token_logprobs(logits.requires_grad_(), targets).grad_fn is None


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(1, 70),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
    temperature=st.floats(0.05, 20),
    seed=st.integers(0, 2**16),
)
def test_any_shape_dtype_and_magnitude_gives_the_float64_answer(tokens, vocab, dtype, scale, temperature, seed):
    logits, targets = batch(tokens, vocab, dtype=dtype, seed=seed, scale=scale)
    logits = logits.clamp(-6e4, 6e4)
    found = token_statistics(logits, targets, entropy=True, temperature=temperature)
    exact = reference(logits, targets, temperature)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    torch.testing.assert_close(found.logprobs.double(), exact[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.logsumexp.double(), exact[1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.entropy.double(), exact[2], rtol=4 * tolerance, atol=4 * tolerance)


BAD_INPUT = {
    "integer logits": (lambda x, t: (x.long(), t, {}), rl_logprobs.errors.DtypeError, "floating point"),
    "float targets": (lambda x, t: (x, t.float(), {}), rl_logprobs.errors.DtypeError, "integer"),
    "no vocabulary dim": (lambda x, t: (x[0], t, {}), rl_logprobs.errors.ShapeError, "tokens, vocab"),
    "no tokens": (lambda x, t: (x[:0], t[:0], {}), rl_logprobs.errors.ShapeError, "at least one token"),
    "targets of another shape": (lambda x, t: (x, t[:-1], {}), rl_logprobs.errors.ShapeError, r"\(3,\).*\(4,\)"),
    "target too large": (lambda x, t: (x, t + 9, {}), rl_logprobs.errors.TargetError, r"\[0, 9\)"),
    "negative target": (lambda x, t: (x, t * 0 - 1, {}), rl_logprobs.errors.TargetError, "first is -1"),
    "target in the padding": (
        lambda x, t: (x, t * 0 + 8, {"shard": VocabShard(8)}),
        rl_logprobs.errors.TargetError,
        "8",
    ),
    "vocabulary too large": (lambda x, t: (x, t, {"shard": VocabShard(10)}), rl_logprobs.errors.ShapeError, "10.*9"),
    "temperature zero": (lambda x, t: (x, t, {"temperature": 0.0}), rl_logprobs.errors.OptionError, "0.0"),
    "temperature negative": (lambda x, t: (x, t, {"temperature": -1}), rl_logprobs.errors.OptionError, "-1"),
    "temperature NaN": (lambda x, t: (x, t, {"temperature": math.nan}), rl_logprobs.errors.OptionError, "nan"),
    "a temperature is zero": (
        lambda x, t: (x, t, {"temperature": torch.tensor([1.0, 0.0, 1.0, 1.0])}),
        rl_logprobs.errors.OptionError,
        "least is 0.0",
    ),
    "temperatures of another shape": (
        lambda x, t: (x, t, {"temperature": torch.ones(3)}),
        rl_logprobs.errors.ShapeError,
        r"\(3,\).*\(4,\)",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_named(name):
    build, error, message = BAD_INPUT[name]
    logits, targets, options = build(*batch(4, 9))
    with pytest.raises(error, match=message) as caught:
        token_logprobs(logits, targets, **options)
    assert isinstance(caught.value, rl_logprobs.LogprobsError)


def test_a_shard_that_no_vocabulary_has_is_refused():
    for size in (0, -1, 2.5, math.nan):
        with pytest.raises(rl_logprobs.errors.ShapeError, match="vocab_size must be a positive integer"):
            VocabShard(size)
    with pytest.raises(rl_logprobs.errors.OptionError, match="give the group"):
        VocabShard(8, start=4)
