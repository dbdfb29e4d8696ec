"""Float8 products with a scale per block: 128 x 128 of a weight, and 128 summed features of one row of the activations.

Source of the method: DeepSeek-V3 (arXiv:2412.19437, section 3.3).  The casts equal torchao 0.18's
``torchao.prototype.blockwise_fp8_training``, which needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import ScalingType, pad, scaled_mm

from fsdp_runtime.weights.quantize.kernels import BLOCK, FP8, FP8_MAX, cell_amax

#: The smallest maximum of a block; a block of zeros stays zero.
_LEAST = 1e-12
#: cuBLAS reads the scales of a weight in groups of this number.
_SCALE_GROUP = 4
#: The values in float8 ``[rows, summed]``, and their scales, one for a block.
Blocks = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BlockwiseRecipe:
    """The casts and the products of ``"blockwise"``; every product sums over whole blocks."""

    emulate: bool
    multiple: ClassVar[int] = BLOCK
    tokens: ClassVar[int] = BLOCK
    products: ClassVar[int] = 3

    def cast(self, tensor: Tensor, operand: str, *, sharded: int | None, mesh: DeviceMesh | None) -> Blocks:
        """Cast an operand; a shard holds whole blocks, so its scales need no other rank."""
        matrix = tensor.t() if "_for_" in operand else tensor
        cells = cell_amax(matrix, (0, 0), (BLOCK if operand.startswith("weight") else 1, BLOCK))
        scales = (FP8_MAX / cells.clamp(min=_LEAST).double()).float()
        values = (matrix * _per_element(scales, matrix)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return values.contiguous(), scales.reciprocal()

    def product(self, left: Blocks, right: Blocks, dtype: torch.dtype) -> Tensor:
        """Return ``left @ right.T``."""
        if self.emulate:
            values = [block.float() * _per_element(scales, block) for block, scales in (left, right)]
            return (values[0] @ values[1].t()).to(dtype)
        (rows, row_scales), (columns, column_scales) = left, right
        square = len(column_scales) < len(columns)
        return scaled_mm(
            rows,
            columns.t(),
            row_scales.t().contiguous().t(),
            ScalingType.BlockWise1x128,
            _grouped(column_scales).t() if square else column_scales.t().contiguous().t(),
            ScalingType.BlockWise128x128 if square else ScalingType.BlockWise1x128,
            output_dtype=dtype,
        )


def _per_element(scales: Tensor, matrix: Tensor) -> Tensor:
    """Repeat the scale of each block for the elements of a matrix."""
    if len(scales) < len(matrix):
        scales = scales.repeat_interleave(BLOCK, 0)
    return scales.repeat_interleave(BLOCK, 1)


def _grouped(scales: Tensor) -> Tensor:
    """Fill the rows of scales up to whole groups."""
    return pad(scales, (0, -scales.shape[1] % _SCALE_GROUP), value=1.0).contiguous()
