"""Kept sets as a value: every form that generators return gives the same rows, and malformed sets are named."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rl_logprobs
from rl_logprobs import KeptTokens, next_token_targets

ROWS = st.lists(st.lists(st.integers(0, 30), unique=True, max_size=5), min_size=1, max_size=8)


def rows_of(kept_tokens):
    bounds = kept_tokens.offsets.tolist()
    return [kept_tokens.ids[start:end].tolist() for start, end in pairwise(bounds)]


@given(rows=ROWS, order=st.randoms())
def test_every_form_holds_the_same_rows(rows, order):
    assert rows_of(KeptTokens.from_rows(rows)) == rows
    padded = torch.full((len(rows), 6), -1)
    for row, kept in zip(padded, rows, strict=True):
        row[: len(kept)] = torch.tensor(kept, dtype=torch.int64)
    assert rows_of(KeptTokens.from_padded(padded)) == rows
    sizes = torch.tensor([len(row) for row in rows])
    assert rows_of(KeptTokens.from_padded(padded.clamp(min=0), sizes)) == rows
    chosen = order.sample(range(len(rows)), len(rows))
    assert rows_of(KeptTokens.from_rows(rows).select(torch.tensor(chosen))) == [rows[i] for i in chosen]


@given(rows=ROWS)
def test_rows_move_with_shifted_targets(rows):
    assert rows_of(KeptTokens.from_rows(rows).next_token()) == rows[1:] + rows[:1]


def test_completions_lie_at_their_tokens_and_move_to_the_positions_that_predict_them():
    vllm = SimpleNamespace(token_ids=[4, 7, 1], offsets=[0, 2, 3])
    sglang = [[5], [6, 2], [9]]
    kept_tokens = KeptTokens.from_completions([vllm, sglang], starts=[2, 1], length=5)
    assert rows_of(kept_tokens) == [[], [], [4, 7], [1], [], [], [5], [6, 2], [9], []]
    tokens = torch.tensor([[0, 0, 4, 1, 0], [0, 5, 2, 9, 0]])
    drawn = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 1, 0]]).bool()
    targets = next_token_targets(tokens.where(drawn, -100))
    for target, kept in zip(targets.flatten().tolist(), rows_of(kept_tokens.next_token()), strict=True):
        assert (target in kept) if target >= 0 else True
        assert (kept == []) == (target < 0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: KeptTokens.from_rows([[1], [2, 5, 2]]),
            rl_logprobs.errors.KeptTokensError,
            "token 1 contains id 2 twice",
        ),
        (lambda: KeptTokens.from_rows([[3, -4]]), rl_logprobs.errors.KeptTokensError, "token 0 contains id -4"),
        (
            lambda: KeptTokens(torch.tensor([1, 2]), torch.tensor([0, 1])),
            rl_logprobs.errors.ShapeError,
            "0 to the 2 ids.*0 to 1",
        ),
        (lambda: KeptTokens(torch.arange(3), torch.tensor([0, 2, 1, 3])), rl_logprobs.errors.ShapeError, "descend"),
        (
            lambda: KeptTokens(torch.arange(4).view(2, 2), torch.tensor([0, 4])),
            rl_logprobs.errors.ShapeError,
            r"\(2, 2\)",
        ),
        (lambda: KeptTokens(torch.ones(1), torch.tensor([0, 1])), rl_logprobs.errors.DtypeError, "ids.*float32"),
        (lambda: KeptTokens.from_rows([[1], [2.5]]), rl_logprobs.errors.DtypeError, "rows must contain integers alone"),
        (lambda: KeptTokens.from_rows([1, 2]), rl_logprobs.errors.DtypeError, "rows.* int, which is no list"),
        (
            lambda: KeptTokens.from_completions([object()], [0], 3),
            rl_logprobs.errors.DtypeError,
            r"masks\[0\] .* object",
        ),
        (
            lambda: KeptTokens.from_rows([[1]]).select(torch.tensor([1])),
            rl_logprobs.errors.ShapeError,
            r"\[0, 1\), got 1 to 1",
        ),
        (lambda: KeptTokens.from_rows([[1]], missing_target="nan"), rl_logprobs.errors.OptionError, "'nan'"),
        (
            lambda: KeptTokens.from_completions([[[1]]], [0, 1], 3),
            rl_logprobs.errors.ShapeError,
            "1 masks and 2 starts",
        ),
        (
            lambda: KeptTokens.from_completions([[[1], [2]]], [2], 3),
            rl_logprobs.errors.ShapeError,
            "completion 0 has 2 tokens from position 2, and a row has 3",
        ),
        (
            lambda: KeptTokens.from_padded(torch.zeros(2, 3), torch.ones(3)),
            rl_logprobs.errors.ShapeError,
            r"\(2, 3\) and \(3,\)",
        ),
    ],
)
def test_malformed_sets_are_named_with_their_numbers(make, error, message):
    with pytest.raises(error, match=message):
        make()
