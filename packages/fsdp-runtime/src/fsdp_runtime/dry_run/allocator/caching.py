"""A model of torch's CUDA caching allocator: which bytes it reserves for a sequence of allocations and frees.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` of torch 2.9.  Sizes are rounded up to
512 bytes.  Sizes up to 1 MiB come from segments of 2 MiB, others from segments of 20 MiB or, from 10 MiB on, of their
own size rounded up to 2 MiB.  A free block is chosen by best fit within its stream, split if enough remains, and merged
with its free neighbours when it is freed.  With expandable segments a stream has one segment for each kind of size,
which grows at its end and in its holes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIN_BLOCK = 512
SMALL_SIZE = 2**20
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
MIN_LARGE_ALLOCATION = 10 * 2**20
ROUND_LARGE = 2 * 2**20
_ADDRESS_SPACE = 2**20 * LARGE_SEGMENT  # of an expandable segment: more than any device, in whole pages


class OutOfDeviceMemoryError(Exception):
    """The device has no room for another segment, even with all cached segments released."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The options of ``PYTORCH_ALLOC_CONF`` that change the reserved bytes."""

    expandable_segments: bool = False  # whether segments grow
    max_split_size: int | None = None  # bytes from which a block is not split, ``None`` for any
    garbage_collection_threshold: float = 0.0  # share of ``device_memory`` that releases unused segments; 0: never
    roundup_power2_divisions: int = 0  # sizes between two powers of two to round up to; 0: multiples of 512 bytes
    device_memory: int | None = None  # bytes that can be reserved, ``None`` for any number


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A part of a segment, in use, free, or (of an expandable segment) without memory."""

    address: int
    size: int
    pool: _Pool
    used: bool = False
    mapped: bool = True
    age: int = 0
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None


@dataclass(eq=False, slots=True)
class _Blocks:
    """Blocks by address, and in the order of best fit."""

    at: dict[int, MemoryBlock] = field(default_factory=dict)
    keys: list[tuple[int, int]] = field(default_factory=list)  # sizes and addresses

    def add(self, block: MemoryBlock) -> None:
        insort(self.keys, (block.size, block.address))
        self.at[block.address] = block

    def remove(self, block: MemoryBlock) -> None:
        del self.keys[bisect_left(self.keys, (block.size, block.address))]
        del self.at[block.address]


@dataclass(eq=False, slots=True)
class _Pool:
    """The free blocks of one stream and kind of size, and the holes of its expandable segment."""

    small: bool
    free: _Blocks = field(default_factory=_Blocks)
    holes: _Blocks = field(default_factory=_Blocks)


class CachingAllocator:
    """The allocator of one device."""

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.reserved = self.peak_reserved = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0
        self._clock = 0

    def allocate(self, nbytes: int, stream: int = 0) -> MemoryBlock:
        """Return a block for a tensor."""
        self._clock += 1
        size = round_size(nbytes, self.settings.roundup_power2_divisions)
        pool = self._pools.setdefault((stream, size <= SMALL_SIZE), _Pool(size <= SMALL_SIZE))
        block = self._best_fit(pool, size)
        if block is None:
            segment = segment_size(size)
            self._collect_garbage(segment)
            reserve = self._grow if self.settings.expandable_segments else self._new_segment
            block = reserve(pool, segment)
            if block is None:
                self.release_cached()
                block = reserve(pool, segment)
            if block is None:
                raise OutOfDeviceMemoryError
        self._split(block, size)
        block.used = True
        return block

    def free(self, block: MemoryBlock) -> None:
        """Take a block back; its memory stays reserved."""
        self._clock += 1
        block.used, block.age = False, self._clock
        block.pool.free.add(self._with_neighbours(block, block.pool.free))

    def reset_peak(self) -> None:
        """Restart the measurement of the peak."""
        self.peak_reserved = self.reserved

    def release_cached(self) -> None:
        """Give back all memory that no tensor uses, as ``torch.cuda.empty_cache``."""
        for pool in self._pools.values():
            for block in list(pool.free.at.values()):
                self._release(block)

    def _best_fit(self, pool: _Pool, size: int) -> MemoryBlock | None:
        free = pool.free
        index = bisect_left(free.keys, (size, 0))
        if index == len(free.keys):
            return None
        block = free.at[free.keys[index][1]]
        if self.settings.expandable_segments:
            # A block that can grow counts with its largest size.
            while index + 1 < len(free.keys):
                other = free.at[free.keys[index + 1][1]]
                if _expandable_size(other) >= _expandable_size(block):
                    break
                index, block = index + 1, other
        limit = self.settings.max_split_size
        if limit is not None and (
            (size < limit <= block.size) or (size >= limit and block.size >= size + LARGE_SEGMENT)
        ):
            return None
        free.remove(block)
        return block

    def _new_segment(self, pool: _Pool, size: int) -> MemoryBlock | None:
        if not self._take(size):
            return None
        block = MemoryBlock(self._next_address, size, pool)
        self._next_address += size + LARGE_SEGMENT
        return block

    def _grow(self, pool: _Pool, size: int) -> MemoryBlock | None:
        """Map memory of an expandable segment: into its first hole with enough room, from the free block before it."""
        block = self._with_room(pool, size)
        if block is None:
            block = MemoryBlock(self._next_address, _ADDRESS_SPACE, pool, mapped=False)
            self._next_address += 2 * _ADDRESS_SPACE
            pool.holes.add(block)
        if block.mapped:
            pool.free.remove(block)
        else:
            block = self._map(block, min(block.size, size))
            if block is None:
                return None
        while block.size < size:
            assert block.after is not None  # noqa: S101  # _with_room
            added = self._map(block.after, min(size - block.size, block.after.size))
            if added is None:
                pool.free.add(block)
                return None
            block = self._merge(block, added)
        return block

    def _with_room(self, pool: _Pool, size: int) -> MemoryBlock | None:
        for _, first in sorted(pool.holes.at.items()):
            if first.before is not None and not first.before.used:
                first = first.before
            room: int = 0
            block: MemoryBlock | None = first
            while room < size and block is not None and not block.used:
                room += block.size
                block = block.after
            if room >= size:
                return first
        return None

    def _map(self, hole: MemoryBlock, size: int) -> MemoryBlock | None:
        """Give memory to the beginning of a hole, in whole pages; return it, merged with free memory after it."""
        page = SMALL_SEGMENT if hole.pool.small else LARGE_SEGMENT
        size = min(-(-size // page) * page, hole.size)
        if not self._take(size):
            return None
        hole.pool.holes.remove(hole)
        if hole.size > size:
            hole.pool.holes.add(_cut(hole, size))
        hole.mapped = True
        return self._with_neighbours(hole, hole.pool.free)

    def _take(self, size: int) -> bool:
        limit = self.settings.device_memory
        if limit is not None and self.reserved + size > limit:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _collect_garbage(self, size: int) -> None:
        """Release the segments that are unused for longest, until reserved bytes are below the threshold."""
        threshold, memory = self.settings.garbage_collection_threshold, self.settings.device_memory
        if not threshold or memory is None or self.reserved + size <= threshold * memory:
            return
        unused = [b for pool in self._pools.values() if not pool.small for b in pool.free.at.values() if _is_whole(b)]
        for block in sorted(unused, key=lambda each: each.age):
            if self.reserved + size <= threshold * memory:
                return
            self._release(block)

    def _release(self, block: MemoryBlock) -> None:
        if self.settings.expandable_segments:
            self._unmap(block)
        elif _is_whole(block):
            block.pool.free.remove(block)
            self.reserved -= block.size

    def _unmap(self, block: MemoryBlock) -> None:
        page = SMALL_SEGMENT if block.pool.small else LARGE_SEGMENT
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if end <= start:
            return
        pool = block.pool
        pool.free.remove(block)
        if start > block.address:
            before, block = block, _cut(block, start - block.address)
            pool.free.add(before)
        if block.address + block.size > end:
            pool.free.add(_cut(block, end - block.address))
        self.reserved -= block.size
        block.mapped = False
        pool.holes.add(self._with_neighbours(block, pool.holes))

    def _split(self, block: MemoryBlock, size: int) -> None:
        remaining = block.size - size
        limit = self.settings.max_split_size
        if block.pool.small or self.settings.expandable_segments:
            splits = remaining >= MIN_BLOCK
        else:
            splits = (limit is None or size < limit) and remaining > SMALL_SIZE
        if splits:
            block.pool.free.add(_cut(block, size))

    def _with_neighbours(self, block: MemoryBlock, listed: _Blocks) -> MemoryBlock:
        """Merge a block with its listed neighbours, and remove them from the list."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.address in listed.at:
                listed.remove(neighbour)
                block = self._merge(block, neighbour)
        return block

    def _merge(self, one: MemoryBlock, other: MemoryBlock) -> MemoryBlock:
        first, last = (one, other) if one.address < other.address else (other, one)
        first.size += last.size
        first.after = last.after
        if last.after is not None:
            last.after.before = first
        first.age = max(first.age, last.age)
        return first


def round_size(nbytes: int, power2_divisions: int = 0) -> int:
    """Return the bytes of the block for a tensor of ``nbytes``."""
    if nbytes < MIN_BLOCK:
        return MIN_BLOCK
    if power2_divisions > 1 and nbytes > MIN_BLOCK * power2_divisions:
        step = (1 << (nbytes.bit_length() - 1)) // power2_divisions
        return -(-nbytes // step) * step
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK


def segment_size(size: int) -> int:
    """Return the bytes of a new segment for a block of ``size`` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOCATION:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def _expandable_size(block: MemoryBlock) -> int:
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)


def _is_whole(block: MemoryBlock) -> bool:
    return block.before is None and block.after is None


def _cut(block: MemoryBlock, size: int) -> MemoryBlock:
    """Cut a block that is not in use off after ``size`` bytes; return the rest."""
    address, remaining = block.address + size, block.size - size
    rest = MemoryBlock(address, remaining, block.pool, False, block.mapped, block.age, block, block.after)
    if block.after is not None:
        block.after.before = rest
    block.after, block.size = rest, size
    return rest
