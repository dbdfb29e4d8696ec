"""Encode the elements of a block that changed, bit for bit: positions and new values, in the smallest of five forms.

======  ==========================================================================================
form    content
======  ==========================================================================================
0       nothing changed
1       all values
2       one bit per element that says whether it changed, then the new values
3       gaps between changed positions in one byte each (255 means: 255 further, no change), values
4       as 3, with two bytes each (65535)
======  ==========================================================================================

A record begins with two 8-byte integers: the form plus 8 times the bytes of positions, and the number of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_runtime.errors import WeightSyncError

_SAME, _ALL, _BITS, _GAPS_1, _GAPS_2 = range(5)
HEADER_BYTES = 16
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode_changes(old: Tensor | None, new: Tensor) -> Tensor:
    """Return the record that turns ``old`` into ``new``.

    Args:
        old: the values that the receiver has, of the shape and dtype of ``new``; ``None`` for unknown ones.
        new: the values.

    Returns:
        ``[bytes]``, uint8, at most 16 bytes more than the values.
    """
    values = _bits(new)
    if old is None:
        return _record(_ALL, values.new_empty(0, dtype=torch.uint8), values)
    changed = _bits(old) != values
    where = changed.nonzero().view(-1)
    if not len(where):
        return _record(_SAME, values.new_empty(0, dtype=torch.uint8), values[:0])
    gaps = torch.diff(where, prepend=where.new_full((1,), -1)) - 1
    sizes = {
        _BITS: -(-len(values) // 8),
        _GAPS_1: len(gaps) + int((gaps // 255).sum()),
        _GAPS_2: 2 * (len(gaps) + int((gaps // 65535).sum())),
    }
    form = min(sizes, key=sizes.__getitem__)
    if sizes[form] + len(where) * values.itemsize >= values.nbytes:
        return _record(_ALL, values.new_empty(0, dtype=torch.uint8), values)
    positions = _pack_bits(changed) if form == _BITS else _pack_gaps(gaps, 1 if form == _GAPS_1 else 2)
    return _record(form, positions, values[where])


def apply_changes(records: Tensor, offset: int, target: Tensor) -> int:
    """Apply the record that begins at an offset, and return the offset after it.

    Args:
        records: ``[bytes]``, uint8.
        offset: where the record begins.
        target: the old values, contiguous; changed in place.
    """
    flat = _bits(target)
    form, start, position_bytes, count, end = _parsed(records, offset, flat.itemsize)
    if not 0 <= count <= len(flat) or (form == _ALL and count != len(flat)):
        raise WeightSyncError(
            f"a record of form {form} with {count} values in {end - start} bytes does not fit {len(flat)} elements of "
            f"{flat.itemsize} bytes: ask for a full update"
        )
    if form == _SAME:
        return end
    positions = records[start : start + position_bytes].clone()
    values = records[start + position_bytes : end].clone().view(flat.dtype)
    if form == _ALL:
        flat.copy_(values)
        return end
    where = _unpack_bits(positions) if form == _BITS else _unpack_gaps(positions, 1 if form == _GAPS_1 else 2)
    if len(where) != count or int(where[-1]) >= len(flat):
        raise WeightSyncError(f"a record's {count} positions do not fit {len(flat)} elements: ask for a full update")
    flat[where] = values
    return end


def end_of_record(records: Tensor, offset: int, itemsize: int) -> int:
    """Return the offset after the record that begins at an offset.

    Args:
        records: ``[bytes]``, uint8.
        offset: where the record begins.
        itemsize: bytes of a value.

    Raises:
        WeightSyncError: no record lies there.
    """
    return _parsed(records, offset, itemsize)[-1]


def _parsed(records: Tensor, offset: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """A record's form, the offset and the bytes of its positions, the number of its values, and the offset after it."""
    header = records[offset : offset + HEADER_BYTES].clone()
    if len(header) != HEADER_BYTES:
        raise WeightSyncError(f"an update ends at byte {len(records)}, in the middle of a record: ask for a full one")
    first, count = (int(number) for number in header.view(torch.int64))
    form, position_bytes, start = first % 8, first // 8, offset + HEADER_BYTES
    end = start + position_bytes + count * itemsize
    if form > _GAPS_2 or count < 0 or position_bytes < 0 or end > len(records):
        raise WeightSyncError(
            f"a record of form {form} with {count} values in {end - start} bytes does not fit an update of "
            f"{len(records)} bytes: ask for a full update"
        )
    return form, start, position_bytes, count, end


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers of their size, flat."""
    return tensor.contiguous().view(-1).view(_WORDS[tensor.element_size()])


def _record(form: int, positions: Tensor, values: Tensor) -> Tensor:
    header = torch.tensor([form + 8 * len(positions), len(values)], dtype=torch.int64, device=values.device)
    return torch.cat([header.view(torch.uint8), positions, values.contiguous().view(torch.uint8)])


def _pack_bits(changed: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(changed, (0, -len(changed) % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8, device=changed.device)
    return (padded * weights).sum(1).to(torch.uint8)


def _unpack_bits(positions: Tensor) -> Tensor:
    weights = 2 ** torch.arange(8, device=positions.device)
    return (positions.long().unsqueeze(1) & weights).view(-1).nonzero().view(-1)


def _pack_gaps(gaps: Tensor, width: int) -> Tensor:
    longest = 256**width - 1
    counts = gaps // longest + 1
    packed = torch.full((int(counts.sum()),), longest, dtype=torch.int64, device=gaps.device)
    packed[counts.cumsum(0) - 1] = gaps % longest
    return packed.to(torch.uint8) if width == 1 else packed.to(torch.int16).view(torch.uint8)


def _unpack_gaps(positions: Tensor, width: int) -> Tensor:
    longest = 256**width - 1
    steps = positions.long() if width == 1 else positions.view(torch.int16).long() & longest
    is_change = steps != longest
    # A change moves one element further than its gap.
    where: Tensor = ((steps + is_change).cumsum(0) - 1)[is_change]
    return where
