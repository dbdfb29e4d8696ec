"""Integers of 4 or 8 bits, packed in words of a checkpoint: GPTQ, AWQ, compressed-tensors and torchao's int4.

A code has the value ``code * scale + offset``, with one scale and one offset for a group of columns of a row.  The
layouts: GPTQ's of AutoGPTQ and GPTQModel, AWQ's ``gemm``, compressed-tensors' ``pack-quantized``, torchao's plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime.errors import ConversionError
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint, HubTensor
from fsdp_runtime.weights.quantize.packed import PackedFormat
from tp_plans.boxes import Box

#: The positions of eight columns in a word of AWQ.
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
ReadPart = Callable[..., Tensor]


@dataclass(frozen=True)
class Words:
    """A matrix of integers, packed in words along one dim."""

    name: str
    dim: int
    bits: int = 4
    word: int = 32
    positions: tuple[int, ...] = ()  # of the integers in a word; empty for their order
    added: int = 0  # to every integer of a word, with carries
    flipped: int = 0  # bits of every integer

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the words of a matrix."""
        words = -(-shape[self.dim] * self.bits // self.word)
        return (shape[0], words) if self.dim else (words, shape[1])

    def read(self, read: ReadPart, box: Box) -> Tensor:
        """Return a box of the matrix in int64."""
        count, (start, stop) = self.word // self.bits, box[self.dim]
        outer = (start // count, -(-stop // count))
        words = read(self.name, (*box[: self.dim], outer, *box[self.dim + 1 :])).long()
        words += self.added * sum(1 << self.bits * place for place in range(count))
        shifts = torch.tensor(self.positions or range(count)) * self.bits
        integers = words.unsqueeze(self.dim + 1) >> shifts.view(-1, *[1] * (1 - self.dim)) & (1 << self.bits) - 1
        return integers.flatten(self.dim, self.dim + 1).narrow(self.dim, start % count, stop - start) ^ self.flipped


@dataclass(frozen=True)
class IntegerWeight:
    """A weight ``[out, in]`` in packed integers."""

    words: Words
    scales: str
    zeros: Words | str | int  # codes of the value zero, floats added to the values, or one code for all groups
    shape: tuple[int, int]
    groups: int  # of columns
    columns_first: bool = False  # codes are stored as ``[in, out]``
    groups_first: bool = False  # scales and zeros are stored as ``[groups, out]``
    group_of_column: str = ""
    transposed: bool = False  # as a :class:`StoredWeight`

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the stored tensors."""
        zeros = self.zeros.name if isinstance(self.zeros, Words) else str(self.zeros)
        return self.words.name, self.scales, zeros, self.group_of_column

    def fits(self, tensors: Mapping[str, HubTensor]) -> bool:
        """Return whether the stored tensors have the shapes of this layout."""
        codes, table = self.shape, (self.shape[0], self.groups)
        codes, table = codes[::-1] if self.columns_first else codes, table[::-1] if self.groups_first else table
        zeros = self.zeros.stored_shape(table) if isinstance(self.zeros, Words) else table
        shapes: dict[str, tuple[int, ...]] = {self.words.name: self.words.stored_shape(codes), self.scales: table}
        shapes |= {self.parts[2]: zeros, self.group_of_column: (self.shape[1],)}
        whole = bool(self.group_of_column) or self.shape[1] % self.groups == 0
        return whole and all(tensors[name].shape == shape for name, shape in shapes.items() if name in tensors)

    def packed(self, read: ReadPart, box: Box, fmt: PackedFormat) -> Tensor | None:
        """Return a box in the bytes of a format; ``None`` for another kind, or groups of scattered columns."""
        if fmt.kind != "int4" or self.words.bits != 4:
            return None
        self.require_blocks(fmt, box[1])
        columns, group = torch.arange(self.shape[1]), -(-self.shape[1] // self.groups)
        if self.group_of_column and not torch.equal(read(self.group_of_column).long(), columns // group):
            return None
        scale, offset = self._affine(read, box, columns[slice(*box[1])][:: fmt.block] // group)
        codes = self._codes(read, box).to(torch.uint8)
        return fmt.join(codes[:, ::2] | codes[:, 1::2] << 4, torch.stack((scale, offset), -1))

    def require_blocks(self, fmt: PackedFormat, columns: tuple[int, int] = (0, 0)) -> None:
        """Refuse a format with blocks that cross the groups of the codes."""
        if fmt.kind == f"int{self.words.bits}" == "int4":
            require_blocks(self.words.name, -(-self.shape[1] // self.groups), self.shape[1], columns, fmt)

    def values(self, read: ReadPart, box: Box) -> Tensor:
        """Return the float32 values of a box."""
        if self.group_of_column:
            groups = read(self.group_of_column, (box[1],)).long()
        else:
            groups = torch.arange(*box[1]) // (self.shape[1] // self.groups)
        scale, offset = self._affine(read, box, groups)
        return self._codes(read, box).float().mul_(scale).add_(offset)

    def _codes(self, read: ReadPart, box: Box) -> Tensor:
        codes = self.words.read(read, box[::-1] if self.columns_first else box)
        return codes.mT if self.columns_first else codes

    def _affine(self, read: ReadPart, box: Box, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale and the offset ``[rows, groups]`` of some groups in float32."""
        table = ((0, self.groups), box[0]) if self.groups_first else (box[0], (0, self.groups))
        scale = read(self.scales, table).float()
        if isinstance(self.zeros, Words):
            offset = self.zeros.read(read, table) * -scale
        elif isinstance(self.zeros, int):
            offset = self.zeros * -scale
        else:
            offset = read(self.zeros, table).float() - (1 << self.words.bits - 1) * scale
        tables = (scale.mT, offset.mT) if self.groups_first else (scale, offset)
        return tables[0][:, groups], tables[1][:, groups]


def require_blocks(name: str, group: int, width: int, columns: tuple[int, int], fmt: PackedFormat) -> None:
    """Refuse blocks of columns that cross groups with a stored scale, in rows of ``width`` elements."""
    if any(side % fmt.block for side in (*columns, group)) and (group < width or columns[0] % fmt.block):
        raise ConversionError(
            f"{name}: {group} columns share a stored scale, and they are read in blocks of {fmt.block}: take a "
            f"block_size that divides {group}"
        )


def integer_weight(
    checkpoint: HubCheckpoint, name: str, settings: Callable[[], Mapping[str, Any]]
) -> tuple[str, IntegerWeight] | None:
    """Return a weight with its name if ``name`` has its packed integers; ``settings`` reads the checkpoint's config."""
    tensors, base = checkpoint.tensors, name.removesuffix("qweight").removesuffix("weight_packed")
    parts: tuple[str, ...] = ("scales", "qzeros") if name.endswith(".qweight") else ("weight_scale", "weight_shape")
    is_packed = name.endswith((".qweight", ".weight_packed")) and tensors[name].dtype == "I32"
    if not is_packed or any(f"{base}{part}" not in tensors for part in parts):
        return None
    if len(tensors[name].shape) != 2 or len(tensors[f"{base}{parts[0]}"].shape) != 2:
        return None
    if name.endswith(".weight_packed"):
        weights: Iterable[IntegerWeight] = _compressed(checkpoint, base)
    elif f"{base}g_idx" in tensors:
        weights = _gptq(tensors, base, settings)
    else:
        (inputs, _), (groups, outputs) = tensors[name].shape, tensors[f"{base}scales"].shape
        words, zeros = (Words(f"{base}{part}", 1, positions=_AWQ) for part in ("qweight", "qzeros"))
        weights = [IntegerWeight(words, f"{base}scales", zeros, (outputs, inputs), groups, True, True)]
    weight = next((weight for weight in weights if weight.fits(tensors)), None)
    if weight is not None and weight.group_of_column:
        _require_scales(weight, checkpoint.read(weight.group_of_column))
    return None if weight is None else (f"{base}weight", weight)


def _require_scales(weight: IntegerWeight, groups: Tensor) -> None:
    if outside := sorted({*groups.tolist()} - {*range(weight.groups)}):
        raise ConversionError(
            f"{weight.group_of_column} has groups {outside[:8]}, and {weight.scales} has scales for groups 0 to "
            f"{weight.groups - 1}: the checkpoint is damaged; download or quantize it again"
        )


def _gptq(
    tensors: Mapping[str, HubTensor], base: str, settings: Callable[[], Mapping[str, Any]]
) -> list[IntegerWeight]:
    """Return the layouts of 4 and 8 bits."""
    version = settings().get("checkpoint_format") or ("gptq" if settings().get("quant_method") == "gptq" else None)
    if version not in ("gptq", "gptq_v2"):
        raise ConversionError(
            f"{base}qweight: checkpoint_format={version!r} in the quantization_config of config.json does not say "
            "whether stored zeros are one too low: write 'gptq' (AutoGPTQ; one too low) or 'gptq_v2'"
        )
    (groups, outputs), inputs = tensors[f"{base}scales"].shape, prod(tensors[f"{base}g_idx"].shape)
    weights = []
    for bits in (4, 8):
        words = Words(f"{base}qweight", 0, bits), Words(f"{base}qzeros", 1, bits, added=int(version == "gptq"))
        scales, index = f"{base}scales", f"{base}g_idx"
        weights.append(IntegerWeight(words[0], scales, words[1], (outputs, inputs), groups, True, True, index))
    return weights


def _compressed(checkpoint: HubCheckpoint, base: str) -> Iterator[IntegerWeight]:
    """Yield the layouts of 4 and 8 bits, with words of zeros or without zeros."""
    names = (f"{base}weight_{part}" for part in ("packed", "scale", "zero_point", "g_idx", "shape"))
    packed, scale, zero, index, shape = (name if name in checkpoint.tensors else "" for name in names)
    if checkpoint.tensors[shape].shape != (2,):
        return
    rows, columns = checkpoint.read(shape).long().tolist()
    if index and -1 in checkpoint.read(index):  # the columns are in order
        index = ""
    for bits in (4, 8):
        zeros = Words(zero, 0, bits) if zero else 1 << bits - 1
        groups = checkpoint.tensors[scale].shape[-1]
        words = Words(packed, 1, bits)
        yield IntegerWeight(words, scale, zeros, (rows, columns), groups, group_of_column=index)
