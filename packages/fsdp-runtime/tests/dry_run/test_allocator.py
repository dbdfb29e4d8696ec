"""The model of the caching allocator against the behaviour that torch documents."""

from __future__ import annotations

import pytest

from fsdp_runtime.dry_run.allocator.caching import (
    AllocatorSettings,
    CachingAllocator,
    OutOfDeviceMemoryError,
    round_size,
    segment_size,
)
from fsdp_runtime.dry_run.parse_args import parse_allocator
from fsdp_runtime.errors import EstimateError

MIB = 2**20


@pytest.mark.parametrize(("nbytes", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB)])
def test_sizes_are_multiples_of_512_bytes(nbytes: int, rounded: int) -> None:
    assert round_size(nbytes) == rounded


def test_sizes_round_up_to_divisions_between_powers_of_two() -> None:
    assert round_size(1200 * MIB, 4) == 1280 * MIB  # torch's notes: 1,200 becomes 1,280 of 1,024, 1,280, 1,536, …


@pytest.mark.parametrize(
    ("size", "segment"),
    [(512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB, 10 * MIB), (11 * MIB + 512, 12 * MIB)],
)
def test_segments_by_size(size: int, segment: int) -> None:
    assert segment_size(size) == segment
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == segment


def test_freed_memory_stays_reserved_and_is_used_again() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(100 * MIB))
    assert allocator.reserved == 100 * MIB
    allocator.allocate(40 * MIB)
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 100 * MIB


def test_streams_share_no_memory() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(100 * MIB, stream=0))
    allocator.allocate(100 * MIB, stream=1)
    assert allocator.reserved == 200 * MIB


def test_a_hole_cannot_hold_a_larger_block() -> None:
    fixed = _with_a_hole(CachingAllocator())
    growing = _with_a_hole(CachingAllocator(AllocatorSettings(expandable_segments=True)))
    assert fixed == 300 * MIB  # 100 free, 100 in use, and 100 + 100 more
    assert growing < fixed + 20 * MIB


def _with_a_hole(allocator: CachingAllocator) -> int:
    first, second = allocator.allocate(50 * MIB), allocator.allocate(50 * MIB)
    allocator.allocate(100 * MIB)
    allocator.free(first)
    allocator.free(second)
    allocator.allocate(100 * MIB)
    return allocator.reserved


def test_an_expandable_segment_grows_at_its_end() -> None:
    fixed, growing = (CachingAllocator(AllocatorSettings(expandable_segments=each)) for each in (False, True))
    for allocator in (fixed, growing):
        for size in (40, 60, 80, 100):
            allocator.free(allocator.allocate(size * MIB))
    assert fixed.reserved == 280 * MIB  # no segment was large enough for the next size
    assert growing.reserved == 100 * MIB


def test_large_blocks_are_not_split_beyond_max_split_size() -> None:
    split = CachingAllocator()
    whole = CachingAllocator(AllocatorSettings(max_split_size=100 * MIB))
    for allocator in (split, whole):
        allocator.free(allocator.allocate(200 * MIB))
        allocator.allocate(50 * MIB)
    assert (split.reserved, whole.reserved) == (200 * MIB, 250 * MIB)


def test_a_remainder_of_at_most_1_mib_is_not_split() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    assert allocator.allocate(11 * MIB).size == 12 * MIB
    growing = CachingAllocator(AllocatorSettings(expandable_segments=True))
    assert growing.allocate(11 * MIB).size == 11 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_cached_memory_is_released_to_make_room(expandable: bool) -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=expandable, device_memory=300 * MIB))
    allocator.free(allocator.allocate(200 * MIB, stream=1))
    allocator.allocate(200 * MIB)
    assert allocator.reserved == 200 * MIB
    with pytest.raises(OutOfDeviceMemoryError):
        allocator.allocate(200 * MIB)


def test_garbage_collection_releases_the_oldest_segments_first() -> None:
    allocator = CachingAllocator(AllocatorSettings(garbage_collection_threshold=0.5, device_memory=1000 * MIB))
    for block in [allocator.allocate(size * MIB) for size in (200, 250)]:
        allocator.free(block)
    allocator.allocate(300 * MIB)
    assert allocator.reserved == 300 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_all_memory_is_given_back(expandable: bool) -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=expandable))
    blocks = [allocator.allocate(size) for size in (100, 3 * MIB, 15 * MIB, 200 * MIB) for _ in range(5)]
    for block in blocks[::2] + blocks[1::2]:
        allocator.free(block)
    assert allocator.reserved > 0
    allocator.release_cached()
    assert allocator.reserved == 0


def test_settings_from_text() -> None:
    found = parse_allocator("expandable_segments:True,max_split_size_mb:512")
    assert found == AllocatorSettings(expandable_segments=True, max_split_size=512 * MIB)
    with pytest.raises(EstimateError, match="'backend' is not modelled"):
        parse_allocator("backend:native")
