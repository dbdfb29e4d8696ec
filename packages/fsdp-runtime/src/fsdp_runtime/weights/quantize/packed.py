"""Frozen weights as packed bytes: the blocks of a row one after another, each with its codes and its scale.

A block has consecutive elements of the last dim, so a shard of rows, or of columns in multiples of a block, has the
values of the full tensor.  Scales are bytes too: no cast of a model or of FSDP2 rounds them.  NF4 is from "QLoRA"
(arXiv:2305.14314), appendix E, and equals bitsandbytes; MXFP4 is from the OCP Microscaling Formats (MX) Specification
1.0, section 5.4, and equals gpt-oss; int8 and FP8 have the scales ``amax / 127`` and ``amax / 448``; int4 spreads its
codes from the least to the largest element, and equals GPTQ (arXiv:2210.17323), AWQ (arXiv:2306.00978) and torchao.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from fsdp_runtime._torch_compat import has_values, wrapper_tensor, written_arguments
from fsdp_runtime.errors import ConversionError, OptionError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.sharded.boxes import Chunk, ReadBox, dtensor_of, in_dims, inside, local_part, read_box
from fsdp_runtime.values import require_one_of
from fsdp_runtime.weights.quantize.formats import FP8, FP8_MAX, to_fp4
from tp_plans.boxes import Box, split_box

_aten = torch.ops.aten
PackedKind = Literal["nf4", "int4", "int8", "fp8", "mxfp4"]
#: The elements of a block by default.
BLOCKS: dict[str, int] = {"nf4": 64, "int4": 128, "int8": 128, "fp8": 128, "mxfp4": 32}
#: The key in ``module.__dict__`` of the packed parameters by name.
PACKED = "_fsdp_runtime_packed"
#: Elements that are converted at a time: their float32 copies take 64 MiB.
_AT_ONCE = 2**24
_INT8_MAX = 127.0
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEVELS: dict[str, tuple[float, ...]] = {
    "nf4": NF4,
    "mxfp4": (*_FP4, *(-level for level in _FP4)),
    "int4": tuple(map(float, range(16))),
}
Dim = TypeVar("Dim")
#: Returns a box of a stored weight in the bytes of a format, or ``None``.
ReadCodes = Callable[[str, Box, "PackedFormat"], Tensor | None]
#: The values of both codes of each byte ``[256, 2]``, by kind and device.
_pairs: dict[tuple[str, torch.device], Tensor] = {}


@dataclass(frozen=True)
class PackedFormat:
    """A kind of codes and the number of elements that share a scale."""

    kind: str
    block: int

    @classmethod
    def of(cls, kind: object, block: object) -> PackedFormat:
        """Return a checked format; the block is the kind's default where it is ``None``."""
        require_one_of("Quantized format", kind, get_args(PackedKind))
        default = BLOCKS[str(kind)]
        if block is not None and (type(block) is not int or block < 2 or block % 2):
            raise OptionError(f"block_size={block!r}: give an even number of elements, such as {default}, or None")
        return cls(str(kind), default if block is None else block)

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block // 2 if self.kind in _LEVELS else self.block

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: its codes and its scale; int4 has an offset too."""
        return self.code_bytes + {"mxfp4": 1, "int4": 8}.get(self.kind, 4)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the bytes: a training state with bytes of int8 then does not fit FP8, which has equal shapes."""
        return torch.int8 if self.kind == "int8" else torch.uint8

    def quantize(self, weight: Tensor) -> Tensor:
        """Return the bytes ``[..., blocks * block_bytes]`` of values ``[..., columns]``."""
        columns = weight.shape[-1] // self.block * self.block_bytes
        packed = weight.new_empty((*weight.shape[:-1], columns), dtype=torch.uint8)
        if weight.numel() and not weight.is_meta:
            for rows, values in zip(_rows(packed, columns), _rows(weight, columns), strict=True):
                rows.copy_(self._quantize(values.float().view(len(values), -1, self.block)))
        return packed.view(self.dtype)

    def join(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the bytes of uint8 codes ``[..., blocks * code_bytes]`` and scales ``[..., blocks]``."""
        # The scales of int4 have one more dim: the scale and the offset.
        scale = scales.float().contiguous().view(torch.uint8) if self.kind != "mxfp4" else scales
        shape = scales.shape[:-1] if self.kind == "int4" else scales.shape
        parts = [codes.reshape(*shape, -1), scale.reshape(*shape, -1)]
        return torch.cat(parts, -1).flatten(-2)

    def dequantize(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values ``[..., columns]``; each is a product in float32 that is rounded once."""
        bytes_of_row, packed = packed.shape[-1], packed.view(torch.uint8)
        shape = (*packed.shape[:-1], bytes_of_row // self.block_bytes * self.block)
        if not packed.numel():
            return packed.new_empty(shape, dtype=dtype)
        if torch.compiler.is_compiling() or packed.numel() <= _AT_ONCE:
            return self._dequantize(packed.reshape(-1, bytes_of_row)).to(dtype).view(shape)
        values = packed.new_empty(shape, dtype=dtype)
        for part, rows in zip(_rows(values, bytes_of_row), _rows(packed, bytes_of_row), strict=True):
            part.copy_(self._dequantize(rows))
        return values

    def _quantize(self, blocks: Tensor) -> Tensor:
        """Return the bytes of float32 blocks ``[rows, blocks, block]``."""
        if self.kind == "int4":
            return self._quantize_int4(blocks)
        amax = blocks.abs().amax(-1)
        if self.kind == "mxfp4":
            exponents = (((amax.view(torch.int32) >> 23) & 255) - 2).clamp(0, 254)  # 6 = 1.5 * 2**2
            scaled = blocks / _power_of_two(exponents)[..., None]
            return self.join(_halves(to_fp4(scaled.clamp(-6, 6))), exponents.to(torch.uint8))
        scale = amax / {"nf4": 1.0, "int8": _INT8_MAX, "fp8": FP8_MAX}[self.kind]
        scaled = blocks / torch.where(scale == 0, 1.0, scale)[..., None]
        if self.kind == "int8":
            return self.join(scaled.round_().to(torch.int8).view(torch.uint8), scale)
        if self.kind == "fp8":
            return self.join(scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8), scale)
        levels = torch.tensor(NF4, dtype=torch.float64)
        middles = ((levels[1:] + levels[:-1]) / 2).to(scaled)
        return self.join(_halves(torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8)), scale)

    def _quantize_int4(self, blocks: Tensor) -> Tensor:
        """Spread the codes from the least to the largest element."""
        low, high = blocks.aminmax(dim=-1)
        # A scale of 11 bits and an offset in sixteenths of it: the values are exact, and have the same codes again.
        scale = ((((high - low) / 15).view(torch.int32) + 0xFFF) & ~0xFFF).view(torch.float32)
        offset = torch.where(scale == 0, low, (low / scale * 16).floor() * (scale / 16))
        scaled = (blocks - offset[..., None]) / torch.where(scale == 0, 1.0, scale)[..., None]
        codes = scaled.round_().clamp_(0, 15).to(torch.uint8)
        return self.join(_halves(codes), torch.stack((scale, offset), -1))

    def _dequantize(self, packed: Tensor) -> Tensor:
        """Return the float32 values of the bytes ``[rows, bytes]``."""
        blocks = packed.reshape(len(packed), -1, self.block_bytes)
        codes, scales = blocks[..., : self.code_bytes], blocks[..., self.code_bytes :]
        if self.kind in _LEVELS:
            pairs = _pairs_on(self.kind, packed)
            values = pairs.index_select(0, codes.reshape(-1).int()).view(len(packed), -1, self.block)
        else:
            values = codes.contiguous().view(FP8 if self.kind == "fp8" else torch.int8).float()
        scale = _power_of_two(scales.int()) if self.kind == "mxfp4" else scales.contiguous().view(torch.float32)
        values.mul_(scale[..., :1])
        return (values.add_(scale[..., 1:]) if self.kind == "int4" else values).view(len(packed), -1)


@dataclass(frozen=True)
class PackedWeight:
    """The weight that a parameter of packed bytes stands for."""

    format: PackedFormat
    shape: tuple[int, ...]  # in the model's code
    dtype: torch.dtype
    transposed: bool  # the bytes are of ``[experts, out, in]``, and the model's code reads ``[experts, in, out]``

    def quantize(self, weight: Tensor) -> Tensor:
        """Return the bytes of a weight or of a part of it."""
        return self.format.quantize(weight.mT if self.transposed else weight)

    def dequantize(self, packed: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight, or the part of it that the bytes hold."""
        values = self.format.dequantize(packed, dtype or self.dtype)
        return values.mT if self.transposed else values

    def shape_of(self, packed: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the part of the weight that bytes of a shape hold."""
        return self.turned((*packed[:-1], packed[-1] // self.format.block_bytes * self.format.block))

    def turned(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Return a shape or a box of the weight in the order of the bytes' dims, or the other way round."""
        return (*dims[:-2], dims[-1], dims[-2]) if self.transposed else dims

    def place(self, dim: int) -> int:
        """Return the weight's dim of a dim of the bytes."""
        return 2 * len(self.shape) - 3 - dim if self.transposed and dim >= len(self.shape) - 2 else dim


def fill_packed(tensor: Tensor, weight: PackedWeight, chunks: Sequence[Chunk], read: ReadBox, codes: ReadCodes) -> None:
    """Quantize this rank's shard of a weight from chunks of stored tensors, or take stored codes, by runs of rows."""
    fmt, (local, box) = weight.format, local_part(tensor)
    if not local.numel():
        return
    part = local.view(torch.uint8)
    start, stop = (side // fmt.block_bytes * fmt.block for side in box[-1])
    values_box = (*box[:-1], (start, stop))
    for rows in split_box(values_box, max(_AT_ONCE // 4, stop - start)):
        target = part[inside(values_box, rows)[:-1]]
        if not _copy_codes(target, rows, weight, chunks, codes):
            values = read_box(weight.turned(rows), weight.dtype, chunks, read)
            target.copy_(weight.quantize(values.to(part.device)).view(torch.uint8))


def _copy_codes(target: Tensor, rows: Box, weight: PackedWeight, chunks: Sequence[Chunk], codes: ReadCodes) -> bool:
    """Copy the stored codes and scales of some rows; return ``False`` if the checkpoint has no such codes."""
    fmt = weight.format
    for chunk in chunks:
        if (piece := chunk.intersect(weight.turned(rows))) is None:
            continue
        if (packed := codes(piece.source, piece.source_box, fmt)) is None:
            return False
        in_order = piece.dims == tuple(range(len(rows)))
        if not (in_order if weight.transposed else piece.dims[-1] == len(piece.start) - 1):
            raise ConversionError(
                f"{piece.source}: its codes cannot be rearranged across the rows of the model's weight"
            )
        *before, columns = inside(rows, weight.turned(piece.target))
        in_bytes = slice(*(side // fmt.block * fmt.block_bytes for side in (columns.start, columns.stop)))
        part = target[(*before, in_bytes)]
        part.copy_(packed if weight.transposed else in_dims(packed, piece.dims, part.shape))
    return True


def packed_weights(module: nn.Module) -> dict[str, PackedWeight]:
    """Return the parameters of packed bytes of a module, by name."""
    packed: dict[str, PackedWeight] = vars(module).get(PACKED, {})
    return packed


def packed_weight(entry: StateEntry) -> PackedWeight | None:
    """Return the weight of a state entry of packed bytes, ``None`` for any other."""
    return packed_weights(entry.module).get(entry.attribute)


def pack_parameter(module: nn.Module, name: str, weight: PackedWeight) -> None:
    """Replace a module's parameter by its packed bytes; on the meta device, by bytes without data."""
    packed = weight.quantize(getattr(module, name).detach())
    module.register_parameter(name, nn.Parameter(packed, requires_grad=False))
    vars(module)[PACKED] = {**packed_weights(module), name: weight}


def _rows(tensor: Tensor, columns: int) -> Sequence[Tensor]:
    """Return a tensor as runs of rows, each of at most 2**24 bytes of ``columns`` per row."""
    return torch.split(tensor.reshape(-1, tensor.shape[-1]), max(1, _AT_ONCE // max(columns, 1)))


def _halves(codes: Tensor) -> Tensor:
    """Return 4-bit codes two per byte, the first in the low half."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return ``2 ** (exponent - 127)`` in float32, without rounding."""
    return torch.where(exponents == 0, 2.0**-127, (exponents << 23).view(torch.float32))


def _pairs_on(kind: str, like: Tensor) -> Tensor:
    """Return the table of both values of a byte; it is copied to a device once."""
    key = kind, like.device
    if torch.compiler.is_compiling() or (pairs := _pairs.get(key)) is None:
        levels = _LEVELS[kind]
        table = [[levels[byte & 15], levels[byte >> 4]] for byte in range(256)]
        pairs = torch.tensor(table, dtype=torch.float32, device=like.device)
        if not torch.compiler.is_compiling() and has_values(pairs):
            _pairs[key] = pairs
    return pairs


class DequantizedTensor(Tensor):
    """The values of a shard of packed bytes; an operator dequantizes the rows that it reads."""

    packed: Tensor
    weight: PackedWeight

    @staticmethod
    def __new__(cls, packed: Tensor, weight: PackedWeight) -> DequantizedTensor:
        """Create the wrapper subclass; tensors are created here, not in ``__init__``."""
        tensor: DequantizedTensor = wrapper_tensor(cls, weight.shape_of(packed.shape), weight.dtype, packed.device)
        tensor.packed, tensor.weight = packed.detach(), weight
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Keep shards of rows packed; run every other operator on the values, and none that writes."""
        kwargs, tensor = kwargs or {}, args[0] if args else None
        if any(isinstance(written, cls) for written in written_arguments(function, args, kwargs)):
            raise ConversionError(
                "packed bytes take no values of a transfer: send weights to a model without Quantized"
            )
        if isinstance(tensor, cls):
            if function in (_aten.detach.default, _aten.alias.default):
                return cls(tensor.packed, tensor.weight)
            if function is _aten.view.default and list(args[1]) == list(tensor.shape):
                return cls(tensor.packed, tensor.weight)
            if function is _aten.slice.Tensor and (dim := tensor.weight.place(args[1] % tensor.ndim)) < tensor.ndim - 1:
                return cls(function(tensor.packed, dim, *args[2:], **kwargs), tensor.weight)
        return function(*map(_values, args), **{name: _values(value) for name, value in kwargs.items()})


def _values(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_values(each) for each in value]
    return value.weight.dequantize(value.packed) if isinstance(value, DequantizedTensor) else value


def dequantized_entry(entry: StateEntry) -> StateEntry:
    """Return an entry of packed bytes with values in the shape, dtype and layout of the weight; others unchanged."""
    weight, tensor = packed_weight(entry), entry.tensor
    if weight is None:
        return entry
    if not isinstance(tensor, DTensor):
        return replace(entry, tensor=DequantizedTensor(tensor, weight))
    local, placements = DequantizedTensor(tensor.to_local(), weight), [_placed(p, weight) for p in tensor.placements]
    return replace(entry, tensor=dtensor_of(local, tensor.device_mesh, placements, weight.shape))


def _placed(placement: Placement, weight: PackedWeight) -> Placement:
    dim = getattr(placement, "dim", None)
    return placement if dim is None or weight.place(dim) == dim else Shard(weight.place(dim))
