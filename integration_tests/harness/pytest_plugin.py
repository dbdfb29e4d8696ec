"""Fixtures that hand a test a running world; one world a size serves the whole session."""

from __future__ import annotations

import sys
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


@pytest.fixture(autouse=True)
def no_world_left_behind() -> Iterator[None]:
    """A test that makes this process a rank must end that world, or the next one to try finds it there."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left torch.distributed initialised in pytest's own process")
