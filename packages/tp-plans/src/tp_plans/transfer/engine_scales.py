"""Scales of quantized weights at an engine: cut where their weights are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tp_plans.boxes import Box
from tp_plans.errors import TransferError
from tp_plans.transfer.layout import CheckpointTensor

#: The suffix of a scale's name after its weight's name.
_SUFFIXES = ("_scale_inv", "_scale_2", "_scale")
#: Rows and columns of a block with one ``weight_scale_inv`` (DeepSeek-V3's checkpoints).
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class ScaleOf:
    """The weight that a scale belongs to."""

    weight: str  # its name in the checkpoint
    suffix: str  # the scale's suffix after the weight's name
    cell: tuple[int, int] | None  # its stored rows and columns that share a scale; None for one number for all of them


def scale_of(name: str, tensors: Mapping[str, CheckpointTensor]) -> ScaleOf | None:
    """Return the weight of a scale; ``None`` for a tensor that is no scale."""
    suffix = next((ending for ending in _SUFFIXES if name.endswith(f"weight{ending}")), None)
    weight = name.removesuffix(suffix or "")
    if suffix is None or weight not in tensors:
        return None
    shape, stored = tensors[name].shape, tensors[weight].shape
    if shape in ((), (1,)):
        return ScaleOf(weight, suffix, None)
    if len(shape) == len(stored) == 2:
        cell = (_BLOCK, _BLOCK) if suffix == "_scale_inv" else (1, stored[1] // max(1, shape[1]))
        if cell[1] and shape == tuple(-(-size // width) for size, width in zip(stored, cell, strict=True)):
            return ScaleOf(weight, suffix, cell)
    raise TransferError(
        f"{name} has shape {shape} and its weight {stored}: scales are one number, one per 128 x 128 block "
        "(weight_scale_inv), or one per group of a row"
    )


def in_cells(scale: ScaleOf | None, box: Box, shape: Sequence[int]) -> Box:
    """Return the box of a scale for a box of its weight; without a scale, the box itself."""
    if scale is None or scale.cell is None:
        return box
    for (start, stop), size, cell in zip(box, shape, scale.cell, strict=True):
        if start % cell or (stop % cell and stop != size):
            raise TransferError(
                f"{scale.weight} is cut at {start} to {stop} of {size}, inside of the {cell} elements of a scale: use "
                "a tp with parts that are multiples of them, or leave the weight out of the quantization"
            )
    return tuple((low // cell, -(-high // cell)) for (low, high), cell in zip(box, scale.cell, strict=True))
