"""Fixtures that hand a test a running world; one world a size serves the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.ranks import RankPool


def _pool(world_size: int) -> Iterator[RankPool]:
    pool = RankPool(world_size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two gloo ranks, started on first use."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four gloo ranks, started on first use."""
    yield from _pool(4)
