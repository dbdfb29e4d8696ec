"""Routes as values: those of generators brought into the order of a batch, and routes of some tokens."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_runtime.errors import RoutesError
from fsdp_runtime.steps import Routes, routes_from_generator


def _sequence(tokens: int, first: int = 0, layers: int = 2, width: int = 2) -> Tensor:
    return torch.arange(first, first + tokens * layers * width).view(tokens, layers, width)


@pytest.mark.parametrize("left", [True, False], ids=["left padding", "right padding"])
def test_each_token_gets_its_sequences_route_at_its_position(left: bool) -> None:
    lengths = [4, 2, 3]
    mask = torch.tensor([[4 - n <= i if left else i < n for i in range(4)] for n in lengths])
    sequences = [_sequence(n - 1, first=100 * row) for row, n in enumerate(lengths)]  # the last token never ran
    routes = routes_from_generator(sequences, mask).view(2, 3, 4, 2)
    for row, (sequence, real) in enumerate(zip(sequences, mask, strict=True)):
        own = routes[:, row, real]
        assert torch.equal(own[:, :-1].transpose(0, 1), sequence)
        assert (own[:, -1] == -1).all()
        assert (routes[:, row, ~real] == -1).all()


def test_arrays_and_narrow_integers_are_taken() -> None:
    sequence = _sequence(3).to(torch.int16).numpy()
    routes = routes_from_generator([sequence], torch.ones(1, 3))
    assert routes.dtype == torch.int32
    assert torch.equal(routes.transpose(0, 1), _sequence(3))


@pytest.mark.parametrize(
    ("sequences", "mask", "message"),
    [
        ([_sequence(3)], torch.ones(2, 3), r"1 sequences and attention_mask \(2, 3\)"),
        (
            [_sequence(4)],
            torch.ones(1, 3),
            "sequence 0 has routes of 4 tokens, and its row of the attention mask has 3",
        ),
        ([_sequence(3), _sequence(3, layers=1)], torch.ones(2, 3), r"\(3, 1, 2\)"),
        ([torch.zeros(3, 2).long()], torch.ones(1, 3), r"give \[tokens, layers, k\]"),
        ([_sequence(3) + 0.5], torch.ones(1, 3), r"sequences\[0\] is of torch.float32"),
        (["a base64 text"], torch.ones(1, 3), r"sequences\[0\] is no array of integers"),
        ([_sequence(3)], torch.ones(1, 3, device="meta"), "attention_mask is on the meta device"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(sequences: list[Any], mask: Tensor, message: str) -> None:
    with pytest.raises(RoutesError, match=message):
        routes_from_generator(sequences, mask)


def test_taken_tokens_keep_their_routes_and_others_have_none() -> None:
    routes = Routes({"a": torch.arange(6).view(3, 2), "b": torch.arange(6, 12).view(3, 2)})
    taken = routes.take(torch.tensor([2, 0, -1, 2]))
    assert taken["a"].tolist() == [[4, 5], [0, 1], [-1, -1], [4, 5]]
    assert taken["b"].tolist() == [[10, 11], [6, 7], [-1, -1], [10, 11]]


@pytest.mark.parametrize("tokens", [torch.tensor([0.0]), torch.tensor([True]), torch.tensor([[0]]), torch.tensor([3])])
def test_only_indices_of_tokens_are_taken(tokens: Tensor) -> None:
    with pytest.raises(RoutesError, match="tokens"):
        Routes({"a": torch.arange(6).view(3, 2)}).take(tokens)


def test_routes_can_be_stacked_moved_and_pickled() -> None:
    routes = Routes({"a": torch.zeros(3, 2).long(), "b": torch.ones(3, 2).long()})
    assert routes.stacked().shape == (2, 3, 2)
    assert torch.equal(pickle.loads(pickle.dumps(routes))["b"], routes["b"])
    assert routes.to("meta")["a"].is_meta
    assert repr(routes) == "Routes({'a': (3, 2), 'b': (3, 2)})"
    with pytest.raises(RoutesError, match=r"'a': 2, 'c': 1"):
        Routes({"a": routes["a"], "c": routes["a"][:, :1]}).stacked()
