"""Quantize matrices to FP8 e4m3, MXFP8 and NVFP4; the bits equal torchao 0.18.

The formulas: per tensor and per block, ``amax / 448`` (DeepSeek-V3, arXiv:2412.19437, section 3.3); MXFP8, the OCP
Microscaling Formats (MX) Specification 1.0, section 6.3; NVFP4, "Pretraining Large Language Models with NVFP4"
(arXiv:2509.25149), section 2.  A block of zeros has scale 1, where torchao's division by zero gives NaN.

Each function takes a box of a matrix: ``weight`` has the box's values ``[rows, columns]``, ``start`` its first row and
column.  A cell is a region with one scale.  ``cells`` has the largest magnitude of each full cell that the box touches.
``amax`` is the largest magnitude of the full matrix, 0-d.  Both are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP4_MAX = 6.0
BLOCK = 128
MX_GROUP = 32
NV_GROUP = 16
#: The smallest group scale in NVFP4: the smallest normal number of e4m3.
_LEAST_GROUP_SCALE = 2.0**-6


def cell_amax(weight: Tensor, start: tuple[int, int], cell: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each cell of ``cell`` rows and columns, over the box's elements only."""
    by_column = _amax_of_runs(weight.abs(), start[1], cell[1])
    return _amax_of_runs(by_column.T, start[0], cell[0]).T.float()


def _amax_of_runs(values: Tensor, start: int, length: int) -> Tensor:
    """Maximum over each run of ``length`` columns of the full matrix; the first column here has index ``start``."""
    if length == 1:
        return values
    before = start % length
    padded = torch.nn.functional.pad(values, (before, -(before + values.shape[1]) % length))
    return padded.reshape(len(padded), -1, length).amax(2)


def fp8(weight: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with one scale; return the values in e4m3, and the scale, 0-d float32."""
    scale = _nonzero(amax / FP8_MAX)
    return _to_fp8(weight.float() / scale), scale


def fp8_blocks(weight: Tensor, cells: Tensor, start: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Quantize with a scale per 128 x 128 block; return the values in e4m3, and the blocks' scales in float32."""
    scales = _nonzero(cells / FP8_MAX)
    return _to_fp8(weight.float() / _per_element(scales, start, (BLOCK, BLOCK), weight)), scales


def mxfp8(weight: Tensor, cells: Tensor, start: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return e4m3 values, and one scale exponent (plus 127, uint8) per group of 32 elements of a row."""
    exponents = ((cells.contiguous().view(torch.int32) >> 23) & 255) - 127 - 8  # 448 = 1.75 * 2**8
    biased = exponents.clamp(-127, 128) + 127
    biased = torch.where(cells.isnan(), biased.new_tensor(255), biased)
    scales = (biased << 23).view(torch.float32).clamp(min=2.0**-126)
    return _to_fp8(weight.float() / _per_element(scales, start, (1, MX_GROUP), weight)), biased.to(torch.uint8)


def nvfp4(weight: Tensor, cells: Tensor, start: tuple[int, int], amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with an e4m3 scale per 16 elements of a row, and one scale per matrix; the column count is even."""
    # Returns codes, two per byte, the first in the low half: ``[rows, columns / 2]``; group scales; the float32 scale.
    total = _nonzero(amax / (FP8_MAX * FP4_MAX))
    scales = (cells / FP4_MAX / total).clamp(_LEAST_GROUP_SCALE, FP8_MAX).to(FP8)
    scaled = weight.float() * _per_element((1.0 / total) / scales.float(), start, (1, NV_GROUP), weight)
    codes = to_fp4(scaled.clamp(-FP4_MAX, FP4_MAX))
    return codes[..., ::2] | (codes[..., 1::2] << 4), scales, total


def _per_element(cells: Tensor, start: tuple[int, int], cell: tuple[int, int], box: Tensor) -> Tensor:
    """Expand ``cells`` to the shape of a box: each element gets its cell's value."""
    for dim in range(2):
        if cell[dim] > 1:
            cells = cells.repeat_interleave(cell[dim], dim).narrow(dim, start[dim] % cell[dim], box.shape[dim])
    return cells


def _to_fp8(values: Tensor) -> Tensor:
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def to_fp4(values: Tensor) -> Tensor:
    """The 4-bit e2m1 codes, one per byte, rounded to nearest with ties to even."""
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for limit, tie_up in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
        code += magnitude >= limit if tie_up else magnitude > limit
    code += magnitude > 5.0
    return code | (values.signbit().to(torch.uint8) << 3)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)
