"""The softmax arithmetic: any split of the columns gives the sums and gradients of all columns."""

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_logprobs.softmax.log2_scale import TemperatureScale, rescale_exponent
from rl_logprobs.softmax.partial_softmax import LogitGradient, SoftmaxOptions, TargetColumns, merge
from rl_logprobs.softmax.torch_kernels import reduce_logits, write_gradient
from rl_logprobs.tensors import statistics_dtype

EXTREMES = st.sampled_from([0.0, 1.0, -1.0, 7.25, 1e4, -1e4, -math.inf, 3e4])
LOGITS = st.lists(EXTREMES | st.floats(-50, 50, width=16), min_size=1, max_size=40).filter(
    lambda row: max(row) > -math.inf
)
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def parts_of(logits, target, splits, scale, greater_than=None):
    """The sums of each range of columns between the splits, and where the target lies in it."""
    bounds = sorted({0, logits.shape[-1], *(split % (logits.shape[-1] + 1) for split in splits)})
    for start, stop in pairwise(bounds):
        places = TargetColumns.locate(target, torch.zeros(1, dtype=torch.bool), start, stop - start)
        columns = logits[:, start:stop]
        options = SoftmaxOptions(entropy=True, argmax=True)
        yield columns, places, reduce_logits(columns, places, scale, start, options, greater_than)


def merge_all(parts, scale):
    """The combination of a sequence of contributions."""
    return merge(parts[0].unstack(torch.stack([part.stack() for part in parts])), scale)


@settings(max_examples=150)
@given(row=LOGITS, dtype=DTYPES, splits=st.lists(st.integers(0, 40), max_size=4), temperature=st.floats(0.1, 10))
def test_sums_of_any_split_combine_to_those_of_float64(row, dtype, splits, temperature):
    logits = torch.tensor([row], dtype=torch.float64).to(dtype)
    scale = TemperatureScale.of(temperature, statistics_dtype(dtype))
    target = torch.tensor([len(row) // 2])
    target_logit = logits.gather(1, target[:, None])[:, 0].to(statistics_dtype(dtype))
    total = merge_all([sums for *_, sums in parts_of(logits, target, splits, scale, greater_than=target_logit)], scale)
    exact = logits.double() / temperature
    ulp = torch.finfo(statistics_dtype(dtype)).eps
    logsumexp = total.max_logit * scale.inv_temperature + total.sum_exp2.log2() * scale.ln_factor
    entropy = (total.sum_exp2.log2() - total.weighted_sum / total.sum_exp2) * scale.ln_factor
    torch.testing.assert_close(logsumexp, exact.logsumexp(-1), rtol=4 * ulp, atol=8 * ulp)
    torch.testing.assert_close(
        entropy, torch.special.entr(exact.softmax(-1)).sum(-1), rtol=16 * ulp, atol=max(16 * ulp, 1e-12)
    )
    assert total.argmax.item() == logits.double().argmax(-1).item()
    assert total.num_greater.item() == (logits > logits[:, target[0], None]).sum()


@settings(max_examples=80)
@given(row=LOGITS, splits=st.lists(st.integers(0, 40), max_size=4), overwrite=st.booleans())
def test_gradients_of_any_split_are_columns_of_the_full_gradient(row, splits, overwrite):
    logits = torch.tensor([row], dtype=torch.float64)
    target, scale = logits.argmax(-1), TemperatureScale.of(0.7, torch.float64)
    exact = logits.clone().requires_grad_()
    torch.log_softmax(exact / 0.7, -1)[0, target].sum().backward()
    found = list(parts_of(logits.clone(), target, splits, scale))
    total = merge_all([sums for *_, sums in found], scale)
    gradients = []
    for columns, places, sums in found:
        coefficient = torch.tensor([1 / 0.7], dtype=torch.float64)
        gradient = LogitGradient(
            total.max_logit, -coefficient / total.sum_exp2, None, coefficient, torch.tensor([False])
        )
        if overwrite:
            kept = reduce_logits(columns, places, scale, 0, SoftmaxOptions(inplace_forward=True))
            torch.testing.assert_close(kept.sum_exp2, columns.sum(-1), rtol=1e-15, atol=0)
            gradient = gradient.for_weights(rescale_exponent(sums.max_logit, total.max_logit, scale))
        write_gradient(columns, places, gradient, scale, columns)
        gradients.append(columns)
    torch.testing.assert_close(torch.cat(gradients, -1), exact.grad, rtol=1e-12, atol=1e-14)
