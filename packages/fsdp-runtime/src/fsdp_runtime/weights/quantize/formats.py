"""Formats of quantized checkpoints: the quantized weights, their parts, and the parts' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded.safetensors_io import WeightInfo
from fsdp_runtime.weights.quantize.kernels import (
    BLOCK,
    FP8,
    MX_GROUP,
    NV_GROUP,
    cell_amax,
    fp8,
    fp8_blocks,
    mxfp8,
    nvfp4,
)

QuantizationFormat = Literal["fp8", "fp8_block", "mxfp8", "nvfp4"]
_FORMATS = ", ".join(get_args(QuantizationFormat))

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
            raise OptionError(f"format={self.format!r}: write one of {_FORMATS}")
        keep: object = self.keep
        if not isinstance(keep, tuple) or not all(isinstance(pattern, str) for pattern in keep):
            raise OptionError(f"keep={self.keep!r}: give a tuple of patterns of names, such as ('*.down_proj.weight',)")

    def applies(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether a weight is quantized."""
        kept = any(fnmatchcase(name, pattern) for pattern in (*KEPT, *self.keep))
        return len(shape) == 2 and name.endswith("weight") and not kept

    def parts(self, name: str, shape: Sequence[int]) -> list[WeightInfo]:
        """Return the stored parts of a quantized weight, in the order of :meth:`quantize`.

        Raises:
            OptionError: the length of the weight's rows is not a multiple of the group size.
        """
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
        """Return the largest magnitude of each cell that a box of a weight touches; see ``kernels``."""
        # A single number if the full weight has one scale.
        if self.cell == (1, 1):
            return weight.abs().amax().float().view(1, 1) if weight.numel() else weight.new_zeros(1, 1).float()
        return cell_amax(weight, start, self.cell)

    def quantize_box(self, weight: Tensor, start: tuple[int, int], cells: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        """Quantize a box of a weight; the parts equal the same box of the full weight's parts."""
        # Arguments as in ``kernels``; ``amax`` is used only if :attr:`needs_amax`.
        match self.format:
            case "fp8":
                return fp8(weight, amax)
            case "fp8_block":
                return fp8_blocks(weight, cells, start)
            case "mxfp8":
                return mxfp8(weight, cells, start)
        return nvfp4(weight, cells, start, amax)

    def quantize(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a full weight ``[out, in]``."""
        cells = self.cell_amax(weight, (0, 0))
        return self.quantize_box(weight, (0, 0), cells, cells.amax() if cells.numel() else cells.new_zeros(()))

    def config(self, kept: Sequence[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint's ``config.json``.

        Args:
            kept: the modules with weights that are not quantized.
        """
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


def require_quantization(value: object) -> None:
    """Raise :class:`OptionError` unless ``quantize=`` is a :class:`Quantization` or ``None``."""
    if value is not None and not isinstance(value, Quantization):
        raise OptionError(
            f"quantize={value!r}: give Quantization(format=...) of fsdp_runtime.sync, the format one of {_FORMATS}, or "
            "None for no quantization"
        )
