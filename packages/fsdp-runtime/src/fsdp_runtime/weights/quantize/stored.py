"""Quantized weights in checkpoints: one tensor of codes with tensors of scales beside it, read as one weight.

Schemes: bitsandbytes' nf4 (nested scales included) and int8, FP8 with scales per block, row or tensor (DeepSeek-V3,
compressed-tensors, torchao), int8 per row or group (compressed-tensors, torchao), gpt-oss' MXFP4, and packed integers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime.errors import ConversionError
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint, HubTensor
from fsdp_runtime.weights.quantize.packed import NF4, PackedFormat
from fsdp_runtime.weights.quantize.stored_integers import IntegerWeight, ReadPart, Words, integer_weight, require_blocks
from tp_plans.boxes import Box

_BNB = ".quant_state.bitsandbytes__"
#: Name endings of further tensors of a weight.
_BESIDE = ("_shape", "_g_idx", f"{_BNB}nf4", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
#: Name endings of tensors of a scheme that is not read.
_UNKNOWN = (".weight_packed", ".weight_scale_2", ".qweight", "_qdata", f"{_BNB}fp4")
_KINDS = {"F8_E4M3": "fp8", "I8": "int8"}
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredWeight:
    """A quantized weight of a checkpoint, with the matrix ``[..., out, in]``."""

    kind: str
    codes: str  # name of the stored codes
    scales: str
    shape: tuple[int, ...]  # of the matrix
    cell: tuple[int, int]  # rows and columns that share a scale
    divisor: float = 1.0  # of the stored scales
    state: Mapping[str, Any] | None = None  # bitsandbytes' state of nf4
    transposed: bool = False  # the model's weight is ``[experts, in, out]``
    zeros: str = ""  # name of the stored codes of the value zero, one beside each scale

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the stored tensors."""
        return self.codes, self.scales, self.zeros

    def packed(self, read: ReadPart, box: Box, fmt: PackedFormat) -> Tensor | None:
        """Return a box of the model's weight in the bytes of a format; ``None`` for a format of another kind."""
        if self.kind != fmt.kind or (self.zeros and bool(read(self.zeros).any())):
            return None
        box = self._in_matrix(box)
        self.require_blocks(fmt, box[-1])
        return fmt.join(self._codes(read, box), self._scales(read, box, fmt.block))

    def require_blocks(self, fmt: PackedFormat, columns: tuple[int, int] = (0, 0)) -> None:
        """Refuse a format with blocks that cross the groups of the codes."""
        if fmt.kind == self.kind:
            require_blocks(self.codes, self.cell[1], self.shape[-1], columns, fmt)

    def values(self, read: ReadPart, box: Box) -> Tensor:
        """Return the float32 values of a box of the model's weight."""
        values = self._values(read, self._in_matrix(box))
        return values.mT if self.transposed else values

    def _in_matrix(self, box: Box) -> Box:
        return (*box[:-2], box[-1], box[-2]) if self.transposed else box

    def _values(self, read: ReadPart, box: Box) -> Tensor:
        if self.kind in ("int8", "fp8"):
            dtype = torch.int8 if self.kind == "int8" else torch.float8_e4m3fn
            values = self._codes(read, box).view(dtype).float()
            if self.zeros:
                values -= self._table(read(self.zeros).float(), box, 1)
            return values * self._scales(read, box, 1)
        fmt, (start, stop) = PackedFormat(self.kind, self.cell[1]), box[-1]
        around = (*box[:-1], (start // fmt.block * fmt.block, -(-stop // fmt.block) * fmt.block))
        packed = fmt.join(self._codes(read, around), self._scales(read, around, fmt.block))
        return fmt.dequantize(packed, torch.float32).narrow(-1, start % fmt.block, stop - start)

    def _codes(self, read: ReadPart, box: Box) -> Tensor:
        """Return the codes of a box as bytes, the first of two codes in the low half."""
        (start, stop), last = box[-1], self.shape[-1]
        if self.kind in ("int8", "fp8"):
            return read(self.codes, box).view(torch.uint8)
        if self.kind == "mxfp4":
            return read(self.codes, (*box[:-1], (start // 32, stop // 32), (0, 16))).flatten(-2)
        rows = read(self.codes, ((box[0][0] * last // 2, box[0][1] * last // 2), (0, 1))).view(-1, last // 2)
        codes = rows[:, start // 2 : stop // 2]
        return (codes >> 4) | (codes << 4)

    def _scales(self, read: ReadPart, box: Box, block: int) -> Tensor:
        """Return the scale at the first column of each block of a box."""
        (first, last), (start, stop) = box[-2:]
        if self.kind == "mxfp4":
            return read(self.scales, (*box[:-1], (start // 32, stop // 32)))
        if self.state is not None:
            per_row = self.shape[-1] // self.cell[1]
            amax = self._nf4_amax(read, first * per_row, last * per_row).view(-1, per_row)
            return amax.repeat_interleave(self.cell[1] // block, 1)[:, start // block : stop // block]
        return self._table(read(self.scales).float() / self.divisor, box, block)

    def _table(self, table: Tensor, box: Box, block: int) -> Tensor:
        """Return the number of a cell at the first column of each block of a box."""
        table = table.view(-1, table.shape[-1] if table.ndim > 1 else 1)
        rows, columns = torch.arange(*box[-2]) // self.cell[0], torch.arange(*box[-1], block) // self.cell[1]
        return table[rows[:, None], columns]

    def _nf4_amax(self, read: ReadPart, start: int, stop: int) -> Tensor:
        amax, state = read(self.scales, ((start, stop),)), self.state or {}
        if "nested_blocksize" not in state:
            return amax.float()
        weight = self.scales.removesuffix(".absmax")
        outer = read(f"{weight}.nested_absmax")[torch.arange(start, stop) // state["nested_blocksize"]]
        inner = read(f"{weight}.nested_quant_map")[amax.int()]
        return torch.add(inner * outer, state["nested_offset"])


def read_stored_weights(checkpoint: HubCheckpoint) -> None:
    """Let a checkpoint show each quantized weight as one tensor in float32, and read its values."""
    # Headers decide, and bitsandbytes' state of a weight.  Only ``config.json`` has
    # the size of FP8 blocks and GPTQ's version.
    tensors = dict(checkpoint.tensors)
    stored = dict(_found(checkpoint))
    for name, weight in stored.items():
        file = checkpoint.tensors[weight.parts[0]].file
        for part in (*weight.parts, f"{name.removesuffix('weight')}weight_format", *(name + end for end in _BESIDE)):
            tensors.pop(part, None)
        shape = (*weight.shape[:-2], weight.shape[-1], weight.shape[-2]) if weight.transposed else weight.shape
        tensors[name] = HubTensor(file, shape, "F32")
    checkpoint.show(tensors, stored)


def _found(checkpoint: HubCheckpoint) -> Iterator[tuple[str, StoredWeight | IntegerWeight]]:
    settings = cache(partial(_settings, checkpoint.folder))
    for name, tensor in checkpoint.tensors.items():
        try:
            weight = _weight(checkpoint, name, settings)
        except (KeyError, ValueError, TypeError, IndexError, ZeroDivisionError, AttributeError) as error:
            raise ConversionError(
                f"{name} {tensor.shape} {tensor.dtype} in {tensor.file} does not fit its scales or the "
                f"quantization_config of config.json ({error!r}): download or quantize the checkpoint again"
            ) from error
        if weight is not None:
            yield weight


def _weight(
    checkpoint: HubCheckpoint, name: str, settings: Callable[[], Mapping[str, Any]]
) -> tuple[str, StoredWeight | IntegerWeight] | None:
    """Return a weight with its name if ``name`` has its codes."""
    tensors, tensor, base = checkpoint.tensors, checkpoint.tensors[name], name.removesuffix("weight")
    if (weight := integer_weight(checkpoint, name, settings) or _torchao(checkpoint, name)) is not None:
        return weight
    if unknown := next((end for end in _UNKNOWN if name.endswith(end)), None):
        raise ConversionError(
            f"{name} {tensor.shape} {tensor.dtype} in {tensor.file} is of a scheme or layout that is not read "
            f"({unknown}): bitsandbytes nf4 and int8, FP8, MXFP4, int8, and int4 of GPTQ, AWQ (gemm), "
            "compressed-tensors and torchao (plain) are; take one of these checkpoints, or dequantize it first"
        )
    if name.endswith("_blocks") and (scales := f"{name.removesuffix('_blocks')}_scales") in tensors:
        shape = (*tensor.shape[:-2], tensor.shape[-2] * 32)
        return name.removesuffix("_blocks"), StoredWeight("mxfp4", name, scales, shape, (1, 32), transposed=True)
    if f"{name}{_BNB}nf4" in tensors:
        return name, _bitsandbytes(checkpoint, name)
    if tensor.dtype == "I8" and f"{base}SCB" in tensors:
        _require_elements(tensors, f"{base}SCB", tensor.shape[0])
        return name, StoredWeight("int8", name, f"{base}SCB", tensor.shape, (1, tensor.shape[1]), divisor=127.0)
    scales = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in tensors), "")
    if (kind := _KINDS.get(tensor.dtype)) and scales and len(tensor.shape) == 2:
        cell = _cell(settings, name, tensor, tensors[scales])
        zeros = f"{name}_zero_point" if f"{name}_zero_point" in tensors else ""
        if zeros:
            _require_elements(tensors, zeros, prod(tensors[scales].shape))
        return name, StoredWeight(kind, name, scales, tensor.shape, cell, zeros=zeros)
    return None


def _require_elements(tensors: Mapping[str, HubTensor], name: str, count: int) -> None:
    if prod(tensors[name].shape) != count:
        raise ConversionError(
            f"{name} in {tensors[name].file} has shape {tensors[name].shape}, and its weight needs {count} elements: "
            "download or quantize the checkpoint again"
        )


def _torchao(checkpoint: HubCheckpoint, name: str) -> tuple[str, StoredWeight | IntegerWeight] | None:
    """Return a weight of torchao if ``name`` has its codes: ``Int8Tensor``, ``Float8Tensor`` or ``Int4Tensor``."""
    tensors, (module, _, codes) = checkpoint.tensors, name.rpartition("._")
    stem = name.removesuffix("qdata")
    scales, zeros = (tensors.get(f"{stem}{part}") for part in ("scale", "zero_point"))
    if not codes.endswith("_qdata") or scales is None or f"{stem}act_pre_scale" in tensors:
        return None
    shape, kind = tensors[name].shape, _KINDS.get(tensors[name].dtype)
    if kind is None or scales.dtype not in _FLOATS or len(shape) != 2 or len(scales.shape) != 2:
        return None
    weight, beside = f"{module}.{codes.removesuffix('_qdata')}", (f"{stem}scale", f"{stem}zero_point")
    if zeros is not None and zeros.dtype in _FLOATS:
        words, groups = Words(name, 1, word=8, flipped=8), scales.shape[0]
        packed = IntegerWeight(words, *beside, (shape[0], 2 * shape[1]), groups, groups_first=True)
        return (weight, packed) if kind == "int8" and packed.fits(tensors) else None
    whole = all(size % parts == 0 for size, parts in zip(shape, scales.shape, strict=True))
    if not whole or (zeros is not None and zeros.shape != scales.shape):
        return None
    cell = (shape[0] // scales.shape[0], shape[1] // scales.shape[1])
    return weight, StoredWeight(kind, name, beside[0], shape, cell, zeros=beside[1] if zeros is not None else "")


def _settings(folder: Path | None) -> Mapping[str, Any]:
    if folder is None or not (folder / "config.json").is_file():
        return {}
    return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config") or {}


def _cell(settings: Callable[[], Mapping[str, Any]], name: str, codes: HubTensor, scales: HubTensor) -> tuple[int, int]:
    """Return the rows and columns that share a scale, from the shapes and the config's size of a block."""
    rows, columns = codes.shape
    if scales.shape in ((), (1,), (1, 1)):
        return rows, columns
    if scales.shape in ((rows,), (rows, 1)):
        return 1, columns
    block = tuple(settings().get("weight_block_size") or (128, 128))
    if scales.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise ConversionError(
            f"{name} {codes.shape} has scales {scales.shape}, and blocks of {block} need "
            f"{(-(-rows // block[0]), -(-columns // block[1]))}: set weight_block_size in its config.json"
        )
    return block


def _bitsandbytes(checkpoint: HubCheckpoint, name: str) -> StoredWeight:
    state = json.loads(bytes(checkpoint.read(f"{name}{_BNB}nf4").tolist()))
    shape, block = tuple(state["shape"]), state["blocksize"]
    if len(shape) != 2 or shape[1] % block or tuple(checkpoint.read(f"{name}.quant_map").tolist()) != NF4:
        raise ConversionError(
            f"{name} of shape {shape} has nf4 blocks of {block} that cross its rows, or other levels than nf4: "
            "dequantize the checkpoint first"
        )
    blocks = prod(shape) // block
    _require_elements(checkpoint.tensors, name, prod(shape) // 2)
    _require_elements(checkpoint.tensors, f"{name}.absmax", blocks)
    if "nested_blocksize" in state:
        _require_elements(checkpoint.tensors, f"{name}.nested_absmax", -(-blocks // state["nested_blocksize"]))
        _require_elements(checkpoint.tensors, f"{name}.nested_quant_map", 256)
    return StoredWeight("nf4", name, f"{name}.absmax", shape, (1, block), state=state)
