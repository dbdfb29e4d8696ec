"""Targets: shifted across no boundary, no padding and no packed sequence."""

from itertools import pairwise

import pytest
import torch

import rl_logprobs
from rl_logprobs import next_token_targets, token_logprobs

IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])


def test_the_last_position_has_no_target():
    assert next_token_targets(IDS, ignore_index=-7).tolist() == [[2, 3, 4, 5, 6, -7]]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[0, 0, 1, 1, 1, 1]], [[-100, -100, 4, 5, 6, -100]]),
        ([[1, 1, 1, 1, 0, 0]], [[2, 3, 4, -100, -100, -100]]),
        ([[0, 1, 1, 0, 1, 0]], [[-100, 3, -100, -100, -100, -100]]),
    ],
)
def test_padding_on_either_side_is_neither_scored_nor_scores(mask, expected):
    assert next_token_targets(IDS, attention_mask=torch.tensor(mask)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("cu_seqlens", "expected"),
    [
        ([0, 6], [2, 3, 4, 5, 6, -100]),
        ([0, 2, 3, 6], [2, -100, -100, 5, 6, -100]),
        ([0, 0, 2, 2, 6, 6], [2, -100, 4, 5, 6, -100]),
    ],
)
def test_no_packed_sequence_is_scored_against_the_next(cu_seqlens, expected, dtype):
    found = next_token_targets(IDS[0], cu_seqlens=torch.tensor(cu_seqlens, dtype=dtype))
    assert found.tolist() == expected


def test_packed_logprobs_are_those_of_the_sequences_one_by_one():
    logits = torch.randn(11, 9, dtype=torch.float64)
    ids = torch.randint(0, 9, (11,))
    bounds = [0, 4, 5, 11]
    packed = token_logprobs(logits, next_token_targets(ids, cu_seqlens=torch.tensor(bounds)))
    for start, stop in pairwise(bounds):
        torch.testing.assert_close(
            packed[start:stop], token_logprobs(logits[start:stop], ids[start:stop], shift=True), rtol=0, atol=0
        )


def test_the_ids_are_left_alone():
    ids = IDS.clone()
    next_token_targets(ids, attention_mask=torch.zeros(1, 6), cu_seqlens=torch.tensor([0, 3, 6]))
    assert torch.equal(ids, IDS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, rl_logprobs.errors.ShapeError, "0 to the 6 tokens.*0 to 5"),
        ({"cu_seqlens": torch.tensor([1, 6])}, rl_logprobs.errors.ShapeError, "from 1"),
        ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, rl_logprobs.errors.ShapeError, "descends"),
        ({"cu_seqlens": torch.tensor([0])}, rl_logprobs.errors.ShapeError, "sequences"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, rl_logprobs.errors.DtypeError, "float32"),
        ({"attention_mask": torch.ones(1, 5)}, rl_logprobs.errors.ShapeError, r"\(1, 5\).*\(1, 6\)"),
    ],
)
def test_bad_boundaries_are_named(options, error, message):
    with pytest.raises(error, match=message):
        next_token_targets(IDS, **options)
