"""Documents are found in what a model is given, and move to batches and back without loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdp_runtime import LayoutError
from fsdp_runtime.steps.documents.documents import Documents, find_documents
from fsdp_runtime.steps.documents.isolation import run_per_document

ROWS = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=3)


def _positions(rows: list[list[int]]) -> Tensor:
    """Position ids of rows, filled up with a last document to equal length."""
    longest = max(map(sum, rows)) + 1
    return torch.stack([torch.cat([torch.arange(n) for n in (*row, longest - sum(row))]) for row in rows])


def _documents(positions: Tensor) -> Documents:
    found = find_documents(positions, None, None, (positions.shape[0], positions.shape[1]))
    assert found is not None
    return found


@given(ROWS)
def test_positions_numbers_and_lengths_tell_of_the_same_documents(rows: list[list[int]]) -> None:
    positions = _positions(rows)
    shape = (positions.shape[0], positions.shape[1])
    by_positions = _documents(positions)
    lengths = torch.tensor([0, *by_positions.lengths]).cumsum(0)
    for other in (find_documents(None, by_positions.numbers, None, shape), find_documents(None, None, lengths, shape)):
        assert other is not None
        assert torch.equal(other.begins, by_positions.begins)
    assert torch.equal(by_positions.positions, positions)


@given(ROWS)
def test_rows_return_from_their_batches_and_half_of_a_batch_is_tokens(rows: list[list[int]]) -> None:
    documents = _documents(_positions(rows))
    tokens = torch.arange(documents.begins.numel()).view(documents.begins.shape)[..., None] * torch.ones(3)
    for batches in (documents.batches, documents.singles):
        assert torch.equal(documents.together([batch.take(tokens) for batch in batches], batches), tokens)
    for batch in documents.batches:
        longest = batch.tokens.shape[1]
        assert longest <= 8 or 2 * len(batch.real) > batch.tokens.numel()


def test_padding_is_a_copy_of_the_last_token() -> None:
    (batch,) = _documents(torch.tensor([[0, 1, 2, 0, 0, 1]])).batches
    assert batch.tokens.tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 5]]
    assert batch.real.tolist() == [0, 1, 2, 3, 6, 7]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_masks_of_documents_are_causal_and_keep_what_was_masked(dtype: torch.dtype) -> None:
    allowed = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    allowed[0, 0, 4, 3] = False
    mask = allowed if dtype == torch.bool else torch.zeros(1, 1, 5, 5, dtype=dtype).masked_fill(~allowed, -1e9)
    (batch,) = _documents(torch.tensor([[0, 1, 0, 1, 2]])).batches
    taken = batch.take_mask(mask)
    seen = taken[:, 0] if dtype == torch.bool else taken[:, 0] == 0
    assert seen[0, :2, :2].tolist() == [[True, False], [True, True]]
    assert seen[1].tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert not seen[0, :2, 2].any()
    if dtype == torch.bool:
        assert torch.equal(batch.take_mask(~mask, true_allows=False), ~taken)


@pytest.mark.parametrize("true_allows", [True, False])
def test_a_restricted_mask_allows_no_other_document(true_allows: bool) -> None:
    documents = _documents(torch.tensor([[0, 1, 0]]))
    everything = torch.full((1, 1, 3, 3), true_allows)
    kept = documents.restrict(everything, true_allows=true_allows) == true_allows
    assert kept[0, 0].tolist() == [[True, True, False], [True, True, False], [False, False, True]]


def test_axes_of_rotary_embeddings_count_text_first() -> None:
    text = torch.tensor([[0, 1, 0, 1]])
    stacked = torch.stack([text, torch.zeros_like(text), text])
    assert _find(stacked) == [2, 2]


def _find(positions: Tensor) -> list[int]:
    found = find_documents(positions, None, None, (1, 4))
    assert found is not None
    return found.lengths


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"position_ids": torch.zeros(1, 3)}, r"position_ids \[1, 3\] for rows \[2, 4\]"),
        ({"seq_idx": torch.zeros(3, 4)}, r"seq_idx \[3, 4\] for rows \[2, 4\]"),
        ({"cu_seq_lens": torch.zeros(2, 4)}, r"cu_seq_lens_q \[2, 4\]: give \[documents \+ 1\]"),
    ],
)
def test_boundaries_of_another_shape_are_refused(given: dict[str, Tensor], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        find_documents(**{"position_ids": None, "seq_idx": None, "cu_seq_lens": None, **given}, shape=(2, 4))


def _weighted(tokens: Tensor, pairs: Tensor) -> Tensor:
    """Add to each token the sum of the tokens before it, each times the number of its pair."""
    return tokens + pairs.tril().to(tokens.dtype) @ tokens


@pytest.mark.parametrize("alone", [False, True])
def test_an_input_of_distances_is_that_of_each_document(alone: bool) -> None:
    places = torch.arange(8)
    distances = places[:, None] - places[None, :]
    documents = _documents(_positions([[5, 2], [7]]))
    tokens = torch.randn(2, 8, 3, dtype=torch.float64)
    found = run_per_document(_weighted, (tokens,), {"pairs": distances}, documents, singly=alone)
    own = [(0, 0, 5), (0, 5, 7), (0, 7, 8), (1, 0, 7), (1, 7, 8)]
    for row, begin, end in own:
        length = end - begin
        expected = _weighted(tokens[row, begin:end], distances[:length, :length])
        torch.testing.assert_close(found[row, begin:end], expected)


def test_an_input_of_pairs_that_is_not_of_distances_is_refused() -> None:
    documents = _documents(_positions([[5, 2]]))
    places = torch.arange(8)
    with pytest.raises(LayoutError, match="each pair of tokens"):
        run_per_document(
            _weighted, (torch.randn(1, 8, 3),), {"pairs": places[:, None] * places}, documents, singly=False
        )
