"""Packed rows: every token once, in order, and back."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_runtime import OptionError, SampleError, pack

batches = st.lists(st.integers(1, 40), min_size=1, max_size=20)


def _samples(lengths: list[int]) -> list[torch.Tensor]:
    """Samples of which no two share a token."""
    return [torch.arange(length) + 1000 * (index + 1) for index, length in enumerate(lengths)]


@given(lengths=batches, ranks=st.integers(1, 4), cp=st.sampled_from([1, 2]), multiple_of=st.sampled_from([1, 3]))
@settings(max_examples=30, deadline=None)
def test_every_token_is_in_one_row_once_and_comes_back_to_its_sample(
    lengths: list[int], ranks: int, cp: int, multiple_of: int
) -> None:
    samples = _samples(lengths)
    packing = pack(samples, budget=48, ranks=ranks, cp=cp, multiple_of=multiple_of, distinct_lengths=4, padding_id=7)
    found: dict[Any, torch.Tensor] = {}
    seen = []
    for rank in range(ranks):
        rows = packing.rows(rank)
        assert len(rows) == packing.micro_batches
        for row in rows:
            length = row.input_ids.shape[1]
            assert 0 < length <= 48 * cp
            assert length % multiple_of == 0
            assert cp == 1 or length % (2 * cp) == 0
            seen.append(length)
            ids, positions = row.input_ids[0], row.position_ids[0]
            bounds = row.cu_seqlens.tolist()
            for start, end in pairwise(bounds):
                assert positions[start:end].tolist() == list(range(end - start))
            assert (ids[sum(row.lengths) :] == 7).all()
        found |= packing.unpack([row.input_ids for row in rows], rank)
    assert len(set(seen)) <= 4
    assert set(found) == set(range(len(samples)))
    assert all(torch.equal(found[index], sample) for index, sample in enumerate(samples))


@given(lengths=batches, seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_targets_are_the_next_tokens_of_the_same_sample_that_count(lengths: list[int], seed: int) -> None:
    samples = _samples(lengths)
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.randint(0, 2, (length,), generator=generator) for length in lengths]
    packing = pack(samples, budget=50, loss_masks=masks, multiple_of=5)
    found = packing.unpack([row.targets for row in packing.rows()])
    for index, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        counted = torch.where(mask[1:] != 0, sample[1:], -100)
        assert found[index].tolist() == [*counted.tolist(), -100]
    scored = sum(int((row.targets != -100).sum()) for row in packing.rows())
    assert scored == sum(int(mask[1:].sum()) for mask in masks)  # none for padding


def test_the_same_samples_give_the_same_rows() -> None:
    samples = _samples([5, 9, 2, 30, 17, 17, 8])
    one, other = (pack(samples, budget=32, ranks=2) for _ in range(2))
    assert all(
        torch.equal(a.input_ids, b.input_ids)
        for rank in (0, 1)
        for a, b in zip(one.rows(rank), other.rows(rank), strict=True)
    )


def test_a_rank_without_samples_runs_as_many_micro_batches_on_padding() -> None:
    packing = pack([[1, 2, 3]], budget=4, ranks=2)
    rows = [packing.rows(rank)[0] for rank in (0, 1)]
    assert sorted(len(row.samples) for row in rows) == [0, 1]
    empty = next(row for row in rows if not row.samples)
    assert (empty.targets == -100).all()
    assert empty.input_ids.shape[1] > 0


def test_gradients_go_back_through_unpack() -> None:
    packing = pack([[1, 2, 3], [4, 5]], budget=8)
    (row,) = packing.rows()
    values = torch.randn(row.input_ids.shape, requires_grad=True)
    (packing.unpack([values])[1] * torch.tensor([2.0, 3.0])).sum().backward()
    start = row.samples.index(1) * 3
    expected = torch.zeros(row.input_ids.shape)
    expected[0, start : start + 2] = torch.tensor([2.0, 3.0])
    assert torch.equal(values.grad, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"samples": [[1] * 9, [1] * 12], "budget": 8},
            SampleError,
            "2 of 2 samples exceed a row of 8 tokens (budget=8, cp=1); the longest is sample 1 with 12: shorten them, "
            "or give budget=12 or cp=2 or more",
        ),
        ({"samples": [], "budget": 8}, SampleError, "no samples"),
        ({"samples": [[]], "budget": 8}, SampleError, "sample 0 is (0,)"),
        ({"samples": [torch.tensor([0.5])], "budget": 8}, SampleError, "give [length] integers"),
        ({"samples": [[1, "2"]], "budget": 8}, TypeError, "invalid data type"),
        ({"samples": [[1, 2]], "budget": 8, "loss_masks": [[1]]}, SampleError, "2 tokens and a loss mask (1,)"),
        ({"samples": [[1, 2]], "budget": 8, "loss_masks": []}, SampleError, "1 samples and 0 loss masks"),
        ({"samples": [[1]], "budget": 0}, OptionError, "budget=0: give a positive integer"),
        ({"samples": [[1]], "budget": 8, "ranks": True}, OptionError, "ranks=True: give a positive integer"),
        ({"samples": [[1]], "budget": 8, "ranks": 0}, OptionError, "ranks=0: give a positive integer"),
        ({"samples": [[1]], "budget": 3, "multiple_of": 8}, OptionError, "give a budget of 8 or more"),
        ({"samples": [[1]], "budget": 8, "pair_cost": float("nan")}, OptionError, "pair_cost=nan: give a finite"),
    ],
    ids=str,
)
def test_what_cannot_be_packed_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        pack(**arguments)


def test_a_sample_beyond_the_budget_is_split_over_cp() -> None:
    (row,) = pack([list(range(12))], budget=8, cp=2).rows()
    assert row.input_ids.shape == (1, 12)


def test_values_of_another_shape_are_refused() -> None:
    packing = pack([[1, 2, 3]], budget=8)
    with pytest.raises(SampleError, match="for a row of"):
        packing.unpack([torch.zeros(7)])
    with pytest.raises(SampleError, match="0 tensors for 1 rows"):
        packing.unpack([])
    with pytest.raises(OptionError, match="rank=1 of 1 ranks"):
        packing.rows(1)
