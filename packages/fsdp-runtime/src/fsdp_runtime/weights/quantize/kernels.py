"""Quantize matrices to FP8 e4m3, MXFP8 and NVFP4; the bits are those of torchao 0.18.

The formulas: per tensor and per block, ``amax / 448`` (DeepSeek-V3, arXiv:2412.19437, section 3.3); MXFP8, the OCP
Microscaling Formats (MX) Specification 1.0, section 6.3; NVFP4, "Pretraining Large Language Models with NVFP4"
(arXiv:2509.25149), section 2.  A block of zeros has scale 1, where torchao's division by zero gives NaN.
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
#: The least scale of a group in NVFP4: the smallest normal number of e4m3.
_LEAST_GROUP_SCALE = 2.0**-6


def fp8_per_tensor(weight: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with one scale.

    Args:
        weight: ``[out, in]`` or a part of it.
        amax: largest magnitude of the full weight, 0-d float32.

    Returns:
        The values in e4m3, and the scale, 0-d float32.
    """
    scale = _nonzero(amax / FP8_MAX)
    return _to_fp8(weight.float() / scale), scale


def fp8_per_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with a scale per 128 x 128 block; blocks at the ends may be smaller.

    Args:
        weight: ``[out, in]``.

    Returns:
        The values in e4m3, and scales ``[ceil(out / 128), ceil(in / 128)]`` in float32.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = _nonzero(blocks.abs().amax((1, 3)) / FP8_MAX)
    values = _to_fp8(blocks / scales[:, None, :, None])
    return values.view(padded.shape)[:rows, :columns].contiguous(), scales


def mxfp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with a power of two per group of 32 elements of a row, rounded down.

    Args:
        weight: ``[out, in]``, ``in`` a multiple of 32.

    Returns:
        The values in e4m3, and the scales' exponents ``[out, in / 32]``, biased by 127, in uint8.
    """
    groups = weight.float().reshape(*weight.shape[:-1], -1, MX_GROUP)
    amax = groups.abs().amax(-1)
    exponents = ((amax.view(torch.int32) >> 23) & 255) - 127 - 8  # 448 = 1.75 * 2**8
    biased = exponents.clamp(-127, 128) + 127
    biased = torch.where(amax.isnan(), biased.new_tensor(255), biased)
    scales = (biased << 23).view(torch.float32).clamp(min=2.0**-126)
    return _to_fp8(groups / scales.unsqueeze(-1)).flatten(-2), biased.to(torch.uint8)


def nvfp4(weight: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with an e4m3 scale per group of 16 elements of a row, and one float32 scale over all.

    Args:
        weight: ``[out, in]`` or rows of it, ``in`` a multiple of 16.
        amax: largest magnitude of the full weight, 0-d float32.

    Returns:
        Two values in a byte ``[out, in / 2]`` in uint8, the first in the low half; scales ``[out, in / 16]`` in e4m3;
        the scale over all, 0-d float32.
    """
    total = _nonzero(amax / (FP8_MAX * FP4_MAX))
    groups = weight.float().reshape(*weight.shape[:-1], -1, NV_GROUP)
    scales = groups.abs().amax(-1) / FP4_MAX / total
    scales = scales.clamp(_LEAST_GROUP_SCALE, FP8_MAX).to(FP8)
    scaled = groups * ((1.0 / total) / scales.float()).unsqueeze(-1)
    codes = _to_fp4(scaled.clamp(-FP4_MAX, FP4_MAX).flatten(-2))
    return codes[..., ::2] | (codes[..., 1::2] << 4), scales, total


def _to_fp8(values: Tensor) -> Tensor:
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _to_fp4(values: Tensor) -> Tensor:
    """The 4-bit codes of e2m1, rounded to nearest and ties to even, one in a byte."""
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for limit, tie_up in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
        code += magnitude >= limit if tie_up else magnitude > limit
    code += magnitude > 5.0
    return code | (values.signbit().to(torch.uint8) << 3)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)
