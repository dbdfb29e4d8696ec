"""Formats of quantized checkpoints: the quantized weights, their parts and names, and their bits as in torchao 0.18.

The formulas: per tensor and per block, ``amax / 448`` (DeepSeek-V3, arXiv:2412.19437, section 3.3); MXFP8, the OCP
Microscaling Formats (MX) Specification 1.0, section 6.3; NVFP4, "Pretraining Large Language Models with NVFP4"
(arXiv:2509.25149), section 2.  A block of zeros has scale 1, where torchao's division by zero gives NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded.safetensors_io import WeightInfo

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP4_MAX = 6.0
BLOCK = 128
MX_GROUP = 32
NV_GROUP = 16
#: The smallest group scale in NVFP4: the smallest normal number of e4m3.
_LEAST_GROUP_SCALE = 2.0**-6
QuantizationFormat = Literal["fp8", "fp8_block", "mxfp8", "nvfp4"]
FORMATS = ", ".join(get_args(QuantizationFormat))

#: Weights that quantized checkpoints keep in bfloat16: embeddings, the LM head, routers, vision towers.
KEPT = ("*embed*", "*lm_head*", "*.gate.weight", "*.router.*", "*shared_expert_gate*", "*vision*", "*visual*", "*norm*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Export the weights of linear layers in low precision, quantized from the parameters' dtype.

    ==============  ======================================================  =========================================
    format          parts                                                   as in
    ==============  ======================================================  =========================================
    ``fp8``         ``weight`` e4m3, ``weight_scale`` float32               one scale per tensor; compressed-tensors
    ``fp8_block``   ``weight`` e4m3, ``weight_scale_inv`` float32           128 x 128 blocks; DeepSeek-V3
    ``mxfp8``       ``weight`` e4m3, ``weight_scale`` uint8                 32 elements of a row; ModelOpt
    ``nvfp4``       ``weight`` uint8, ``weight_scale``, ``weight_scale_2``  16 elements of a row; ModelOpt
    ==============  ======================================================  =========================================

    A stored element times its scale is its value; in ``nvfp4``, times both scales.  Two-dimensional weights named
    ``*.weight`` are quantized, except embeddings, LM head, routers, norms and vision towers.

    Args:
        format: one of the four formats.
        keep: name patterns of further weights that stay in bfloat16.

    Raises:
        OptionError: the format is unknown, or ``keep`` is not a tuple of patterns.

    Example:
        >>> import torch
        >>> from fsdp_runtime.sync import Quantization, WeightExport
        >>> export = WeightExport(quantize=Quantization(format="fp8_block"))
        >>> for weight in export.describe(torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False))):
        ...     print(weight.name, weight.shape, weight.dtype)
        0.weight (128, 256) torch.float8_e4m3fn
        0.weight_scale_inv (1, 2) torch.float32
    """

    format: QuantizationFormat
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format not in get_args(QuantizationFormat):
            raise OptionError(f"format={self.format!r}: write one of {FORMATS}")
        keep: object = self.keep
        if not isinstance(keep, tuple) or not all(isinstance(pattern, str) for pattern in keep):
            raise OptionError(f"keep={self.keep!r}: give a tuple of patterns of names, such as ('*.down_proj.weight',)")

    def parts(self, name: str, shape: Sequence[int]) -> list[WeightInfo]:
        """Return the stored parts of a weight in the order of :meth:`quantize`; none if it is not quantized."""
        kept = any(fnmatchcase(name, pattern) for pattern in (*KEPT, *self.keep))
        if len(shape) != 2 or not name.endswith("weight") or kept:
            return []
        rows, columns = shape
        group = {"mxfp8": MX_GROUP, "nvfp4": NV_GROUP}.get(self.format, 1)
        if columns % group:
            raise OptionError(
                f"{name} has {columns} input features, not a multiple of the {group} of a group of {self.format}: "
                f"give keep=({name!r},) or another format"
            )
        values = WeightInfo(name, FP8, (rows, columns))
        match self.format:
            case "fp8":
                return [values, WeightInfo(f"{name}_scale", torch.float32, ())]
            case "fp8_block":
                blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
                return [values, WeightInfo(f"{name}_scale_inv", torch.float32, blocks)]
            case "mxfp8":
                return [values, WeightInfo(f"{name}_scale", torch.uint8, (rows, columns // MX_GROUP))]
        return [
            WeightInfo(name, torch.uint8, (rows, columns // 2)),
            WeightInfo(f"{name}_scale", FP8, (rows, columns // NV_GROUP)),
            WeightInfo(f"{name}_scale_2", torch.float32, ()),
        ]

    @property
    def needs_amax(self) -> bool:
        """Whether the scales depend on the largest magnitude of the full weight."""
        return self.format in ("fp8", "nvfp4")

    @property
    def cell(self) -> tuple[int, int]:
        """Rows and columns that share a scale; (1, 1) if the full weight has one scale."""
        return {"fp8_block": (BLOCK, BLOCK), "mxfp8": (1, MX_GROUP), "nvfp4": (1, NV_GROUP)}.get(self.format, (1, 1))

    def cell_amax(self, weight: Tensor, start: tuple[int, int]) -> Tensor:
        """Return the largest magnitude of each cell that a box of a weight touches; see :func:`cell_amax`."""
        # A single number if the full weight has one scale.
        if self.cell == (1, 1):
            return weight.abs().amax().float().view(1, 1) if weight.numel() else weight.new_zeros(1, 1).float()
        return cell_amax(weight, start, self.cell)

    def quantize_box(self, weight: Tensor, start: tuple[int, int], cells: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        """Quantize a box of a weight; the parts equal the same box of the full weight's parts."""
        # ``start`` is the box's first row and column. ``cells`` has the largest magnitude of each full cell that the
        # box touches, ``amax`` (0-d) the largest magnitude of the full weight, if it :attr:`needs_amax`.
        if self.format == "fp8":
            scale = _nonzero(amax / FP8_MAX)
            return _to_fp8(weight.float() / scale), scale
        if self.format == "fp8_block":
            scales = _nonzero(cells / FP8_MAX)
            return _to_fp8(weight.float() / _per_element(scales, start, self.cell, weight)), scales
        if self.format == "mxfp8":
            exponents = ((cells.contiguous().view(torch.int32) >> 23) & 255) - 127 - 8  # 448 = 1.75 * 2**8
            biased = exponents.clamp(-127, 128) + 127
            biased = torch.where(cells.isnan(), biased.new_tensor(255), biased)
            scales = (biased << 23).view(torch.float32).clamp(min=2.0**-126)
            return _to_fp8(weight.float() / _per_element(scales, start, self.cell, weight)), biased.to(torch.uint8)
        total = _nonzero(amax / (FP8_MAX * FP4_MAX))
        scales = (cells / FP4_MAX / total).clamp(_LEAST_GROUP_SCALE, FP8_MAX).to(FP8)
        scaled = weight.float() * _per_element((1.0 / total) / scales.float(), start, self.cell, weight)
        codes = to_fp4(scaled.clamp(-FP4_MAX, FP4_MAX))
        return codes[..., ::2] | (codes[..., 1::2] << 4), scales, total  # the first of two codes in the low half

    def quantize(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a full weight ``[out, in]``."""
        cells = self.cell_amax(weight, (0, 0))
        return self.quantize_box(weight, (0, 0), cells, cells.amax() if cells.numel() else cells.new_zeros(()))

    def config(self, kept: Sequence[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint's config; ``kept`` modules are not quantized."""
        if self.format == "fp8_block":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": list(kept),
            }
        if self.format == "fp8":
            numbers = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
            weights, inputs = {**numbers, "dynamic": False}, {**numbers, "strategy": "token", "dynamic": True}
            group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
            return {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": group},
                "ignore": list(kept),
            }
        algorithm = {"mxfp8": "MXFP8", "nvfp4": "NVFP4"}[self.format]
        return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": list(kept)}


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
