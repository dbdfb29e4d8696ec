"""The softmax arithmetic: any cut of the columns gives the sums and gradients of the whole."""

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_logprobs.backends import kernels
from rl_logprobs.powers import Scale, peak_lag
from rl_logprobs.rows import statistics_dtype
from rl_logprobs.softmax import LogitGradient, TargetColumns, merge_all

column_sums, write_gradient = kernels(None, torch.device("cpu"))

EXTREMES = st.sampled_from([0.0, 1.0, -1.0, 7.25, 1e4, -1e4, -math.inf, 3e4])
LOGITS = st.lists(EXTREMES | st.floats(-50, 50, width=16), min_size=1, max_size=40).filter(
    lambda row: max(row) > -math.inf
)
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def parts_of(logits, target, cuts, scale, **options):
    """The sums of each stretch of columns between the cuts, and where the target lies in it."""
    bounds = sorted({0, logits.shape[-1], *(cut % (logits.shape[-1] + 1) for cut in cuts)})
    for start, stop in pairwise(bounds):
        places = TargetColumns.among(target, torch.zeros(1, dtype=torch.bool), start, stop - start)
        columns = logits[:, start:stop]
        yield columns, places, column_sums(columns, places, scale, start, moment=True, best=True, **options)


@settings(max_examples=150)
@given(row=LOGITS, dtype=DTYPES, cuts=st.lists(st.integers(0, 40), max_size=4), temperature=st.floats(0.1, 10))
def test_sums_of_any_cut_meet_in_those_of_float64(row, dtype, cuts, temperature):
    logits = torch.tensor([row], dtype=torch.float64).to(dtype)
    scale = Scale.of(temperature, statistics_dtype(dtype))
    target = torch.tensor([len(row) // 2])
    sought = logits.gather(1, target[:, None])[:, 0].to(statistics_dtype(dtype))
    whole = merge_all([sums for *_, sums in parts_of(logits, target, cuts, scale, sought=sought)], scale)
    exact = logits.double() / temperature
    ulp = torch.finfo(statistics_dtype(dtype)).eps
    logsumexp = whole.peak * scale.slope + whole.total.log2() * scale.nats
    entropy = (whole.total.log2() - whole.moment / whole.total) * scale.nats
    torch.testing.assert_close(logsumexp, exact.logsumexp(-1), rtol=4 * ulp, atol=8 * ulp)
    torch.testing.assert_close(
        entropy, torch.special.entr(exact.softmax(-1)).sum(-1), rtol=16 * ulp, atol=max(16 * ulp, 1e-12)
    )
    assert whole.best.item() == logits.double().argmax(-1).item()
    assert whole.larger.item() == (logits > logits[:, target[0], None]).sum()


@settings(max_examples=80)
@given(row=LOGITS, cuts=st.lists(st.integers(0, 40), max_size=4), overwrite=st.booleans())
def test_gradients_of_any_cut_are_columns_of_the_gradient_of_the_whole(row, cuts, overwrite):
    logits = torch.tensor([row], dtype=torch.float64)
    target, scale = logits.argmax(-1), Scale.of(0.7, torch.float64)
    exact = logits.clone().requires_grad_()
    torch.log_softmax(exact / 0.7, -1)[0, target].sum().backward()
    found = list(parts_of(logits.clone(), target, cuts, scale))
    whole = merge_all([sums for *_, sums in found], scale)
    gradients = []
    for columns, places, sums in found:
        strength = torch.tensor([1 / 0.7], dtype=torch.float64)
        gradient = LogitGradient(whole.peak, -strength / whole.total, None, strength, torch.tensor([False]))
        if overwrite:
            kept = column_sums(columns, places, scale, 0, overwrite=True)
            torch.testing.assert_close(kept.total, columns.sum(-1), rtol=1e-15, atol=0)
            gradient = gradient.of_weights(peak_lag(sums.peak, whole.peak, scale))
        write_gradient(columns, places, gradient, scale, columns)
        gradients.append(columns)
    torch.testing.assert_close(torch.cat(gradients, -1), exact.grad, rtol=1e-12, atol=1e-14)
