"""Powers and scaling of many tensors of one device and dtype in one launch, over a table of their chunks."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from rl_logprobs.softmax.triton_backend import launch, note_write
from rl_logprobs.tensors import is_accelerator_assumed, statistics_dtype

KERNELS = "norms.triton_kernels"
#: Elements of a chunk, and of a program's block.
CHUNK, BLOCK = 65_536, 4096
#: The number of tables to keep: one for the norm and one for the scaling of a few sets of parameters.
KEPT = 16

_tables: OrderedDict[tuple[Any, ...], torch.Tensor] = OrderedDict()


def fits_table(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers a range of memory without gaps, in any order of its dims."""
    if is_accelerator_assumed():  # a dry run's tensors have no addresses
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def table_powers(weighted: Sequence[tuple[torch.Tensor, float]], norm_type: float) -> torch.Tensor:
    """Return the sums ``weight * |x| ** norm_type`` of all chunks, or their largest ``|x|``, float64 ``[chunks]``."""
    tensors = [tensor for tensor, _ in weighted]
    first, table = tensors[0], _table(tensors, [weight for _, weight in weighted])
    powers = torch.empty(len(table), dtype=torch.float64, device=first.device)
    largest = norm_type == math.inf
    # Only squares are summed in float32: other powers would leave its range at common magnitudes.
    wide = statistics_dtype(first.dtype) if largest or norm_type == 2 else torch.float64
    constants = {"WIDE": wide, "ORDER": 0.0 if largest else float(norm_type), "LARGEST": largest}
    launch(KERNELS, "power_kernel", (len(table),), first.device, powers=powers, **_launch(tensors, table), **constants)
    return powers


def table_scale_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors in place by a 0-d factor of their device, unless it is 1 or more."""
    first, table = tensors[0], _table(tensors, [1.0] * len(tensors))
    arguments = {"factor": factor, "WIDE": statistics_dtype(first.dtype), **_launch(tensors, table)}
    launch(KERNELS, "scale_kernel", (len(table),), first.device, **arguments)
    note_write(*tensors)


def _launch(tensors: Sequence[torch.Tensor], table: torch.Tensor) -> dict[str, Any]:
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    constants = {"ELEMENT": tensors[0].dtype, "ALIGNED": aligned, "CHUNK": CHUNK, "BLOCK": BLOCK, "num_warps": 8}
    return {"table": table, **constants}


def _table(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the table ``[chunks, 3]`` of tensors that are not empty, made once while their addresses are the same."""
    addresses, sizes = tuple(t.data_ptr() for t in tensors), tuple(t.numel() for t in tensors)
    device, size = tensors[0].device, tensors[0].element_size()
    key = device, size, addresses, sizes, tuple(weights)
    if key in _tables:
        _tables.move_to_end(key)
        return _tables[key]
    lengths = torch.tensor(sizes)
    counts = (lengths + CHUNK - 1) // CHUNK
    owner = torch.repeat_interleave(counts)
    offset = (torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]) * CHUNK
    bits = torch.tensor([struct.unpack("<q", struct.pack("<d", weight))[0] for weight in weights])
    rows = [
        torch.tensor(addresses)[owner] + offset * size,
        (lengths[owner] - offset).clamp(max=CHUNK),
        bits[owner],
    ]
    table = torch.stack(rows, 1)
    if device.type != "cpu":  # from pinned memory, so that the host does not wait
        table = table.pin_memory().to(device, non_blocking=True)
    _tables[key] = table
    if len(_tables) > KEPT:
        _tables.popitem(last=False)
    return table
