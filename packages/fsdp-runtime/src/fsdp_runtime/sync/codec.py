"""Encode a block's changed elements, bit for bit: all values, or the changed values and the gaps between them.

A record begins with two 8-byte integers: bytes per gap plus 8 times the bytes of all gaps, and the number of values.
With 0 bytes per gap, all values follow.  The largest gap skips as many elements, without a changed value after them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sharded import WORDS

HEADER_BYTES = 16


def encode_changes(old: Tensor | None, new: Tensor) -> Tensor:
    """Return the record ``[bytes]``, uint8, from ``old`` to ``new``: at most 16 bytes more than the values."""
    values = _bits(new)
    if old is not None:
        where = (_bits(old) != values).nonzero().view(-1)
        gaps = torch.diff(where, prepend=where.new_full((1,), -1)) - 1
        sizes = {width: width * (len(gaps) + int((gaps // _longest(width)).sum())) for width in (1, 2)}
        width = min(sizes, key=sizes.__getitem__)
        if not len(where) or sizes[width] + len(where) * values.itemsize < values.nbytes:
            return _record(width, _pack_gaps(gaps, width), values[where])
    return _record(0, values.new_empty(0, dtype=torch.uint8), values)


def apply_changes(records: Tensor, offset: int, target: Tensor) -> int:
    """Apply the record at ``offset`` to contiguous old values in place; return the offset after the record."""
    flat = _bits(target)
    width, start, gap_bytes, count, end = _parsed(records, offset, flat.itemsize)
    if not 0 <= count <= len(flat) or (width == 0 and count != len(flat)):
        raise WeightSyncError(
            f"a record of {count} values in {end - start} bytes does not fit {len(flat)} elements of "
            f"{flat.itemsize} bytes: ask for a full update"
        )
    values = records[start + gap_bytes : end].clone().view(flat.dtype)
    if width == 0:
        flat.copy_(values)
        return end
    where = _unpack_gaps(records[start : start + gap_bytes].clone(), width)
    if len(where) != count or (count and int(where[-1]) >= len(flat)):
        raise WeightSyncError(f"a record's {count} positions do not fit {len(flat)} elements: ask for a full update")
    flat[where] = values
    return end


def end_of_record(records: Tensor, offset: int, itemsize: int) -> int:
    """Return the offset after the record at ``offset``; its values have ``itemsize`` bytes."""
    return _parsed(records, offset, itemsize)[-1]


def _parsed(records: Tensor, offset: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """Return bytes per gap, offset of the gaps, bytes of all gaps, number of values, and end of the record."""
    header = records[offset : offset + HEADER_BYTES].clone()
    if len(header) != HEADER_BYTES:
        raise WeightSyncError(f"an update ends at byte {len(records)}, in the middle of a record: ask for a full one")
    first, count = (int(number) for number in header.view(torch.int64))
    width, gap_bytes, start = first % 8, first // 8, offset + HEADER_BYTES
    end = start + gap_bytes + count * itemsize
    if width > 2 or count < 0 or gap_bytes < 0 or gap_bytes % max(width, 1) or end > len(records):
        raise WeightSyncError(
            f"a record of {count} values in {end - start} bytes does not fit an update of {len(records)} bytes: "
            "ask for a full update"
        )
    return width, start, gap_bytes, count, end


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers of the same size, flat."""
    return tensor.contiguous().view(-1).view(WORDS[tensor.element_size()])


def _record(width: int, gaps: Tensor, values: Tensor) -> Tensor:
    header = torch.tensor([width + 8 * len(gaps), len(values)], dtype=torch.int64, device=values.device)
    return torch.cat([header.view(torch.uint8), gaps, values.contiguous().view(torch.uint8)])


def _longest(width: int) -> int:
    return (1 << 8 * width) - 1


def _pack_gaps(gaps: Tensor, width: int) -> Tensor:
    longest = _longest(width)
    counts = gaps // longest + 1
    packed = torch.full((int(counts.sum()),), longest, dtype=torch.int64, device=gaps.device)
    packed[counts.cumsum(0) - 1] = gaps % longest
    return packed.to(torch.uint8) if width == 1 else packed.to(torch.int16).view(torch.uint8)


def _unpack_gaps(packed: Tensor, width: int) -> Tensor:
    longest = _longest(width)
    steps = packed.long() if width == 1 else packed.view(torch.int16).long() & longest
    is_change = steps != longest
    # A change advances by its gap and one element more.
    where: Tensor = ((steps + is_change).cumsum(0) - 1)[is_change]
    return where
