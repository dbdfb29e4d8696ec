"""Fixtures that give a test a pool of ranks; one pool of each size serves the whole session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from harness.environment import environment
from harness.ranks import RankPool

settings.register_profile("any machine", deadline=None)  # a busy one exceeds hypothesis's 200 ms at times
settings.load_profile("any machine")


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


@pytest.fixture(scope="session", autouse=True)
def environment_in_report(
    request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Write the versions into the report of ``--junitxml``, for tools/compatibility.py."""
    for name, value in environment(request.config).items():
        record_testsuite_property(name, value)


@pytest.fixture(autouse=True)
def no_world_left_behind() -> Iterator[None]:
    """End the world of one that a test made of pytest's own process, so that the next test may make its own."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
