"""Pairwise covers: few combinations of several factors that contain every pair of values of two factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice, product
from typing import Any

import pytest


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which any two values of two different factors occur together at least once.

    Greedy: each combination is the one that contains the most pairs, then values, which are still missing.
    """
    return [tuple(values[i] for values, i in zip(factors, chosen, strict=True)) for chosen in _cover(factors)]


def pairwise_first(*factors: Sequence[Any], limit: int | None = None) -> list[Any]:
    """Return every combination as a pytest parameter set, marked ``slow`` unless it belongs to :func:`pairwise`.

    Args:
        factors: the values of each.
        limit: how many combinations are not slow at most: those with the most pairs.

    Raises:
        ValueError: a value of a factor is in none of them.
    """
    fast = set(islice(_cover(factors), limit))
    for place, values in enumerate(factors):
        if {chosen[place] for chosen in fast} != set(range(len(values))):
            raise ValueError(f"limit={limit} leaves out a value of {list(values)}")
    return [
        pytest.param(*(values[i] for values, i in zip(factors, chosen, strict=True)), marks=_marks(chosen in fast))
        for chosen in product(*(range(len(values)) for values in factors))
    ]


def alternating_first(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return every combination of two factors as a pytest parameter set, every second one marked ``slow``.

    In the others each value of a factor occurs with about half of those of the other, as on a chessboard.
    """
    return [
        pytest.param(one, other, marks=_marks((row + column) % 2 == 0))
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]


def _marks(fast: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if fast else (pytest.mark.slow,)


def _cover(factors: Sequence[Sequence[Any]]) -> Iterator[tuple[int, ...]]:
    candidates = list(product(*(range(len(values)) for values in factors)))
    missing = {pair for candidate in candidates for pair in _pairs(candidate)}
    unused = {value for candidate in candidates for value in enumerate(candidate)}
    while missing:
        best = max(candidates, key=lambda one: (len(missing & _pairs(one)), len(unused.intersection(enumerate(one)))))
        missing -= _pairs(best)
        unused.difference_update(enumerate(best))
        yield best


def _pairs(candidate: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(combinations(enumerate(candidate), 2))
