"""A model's shards in low precision: each rank quantizes its shards, with the scales of the full weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded import all_reduce_over, block_view
from fsdp_runtime.weights import Quantization, QuantizationFormat
from tp_plans.boxes import Box, box_shape
from tp_plans.transfer import CheckpointTensor, StoredBlock, TransferLayout


@dataclass(frozen=True)
class _OwnBlock:
    """A block of a weight on this rank, and the local tensors of its parts."""

    weight: str
    block: StoredBlock
    parts: tuple[str, ...]

    @property
    def start(self) -> tuple[int, int]:
        return self.block.box[0][0], self.block.box[1][0]


@dataclass(frozen=True)
class _Shared:
    """Positions of a weight's shared magnitudes in the exchanged tensor."""

    amax: int | None  # position of the largest magnitude, if the format needs it
    first: int  # position of the first cell
    rows: tuple[int, ...]  # rows of cells cut by a block's border; all are exchanged
    columns: tuple[int, ...]  # columns of cells cut by a block's border
    grid: tuple[int, int]  # rows and columns of cells

    @property
    def end(self) -> int:
        return self.first + len(self.rows) * self.grid[1] + len(self.columns) * self.grid[0]

    def strips(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the exchanged cells: the cut rows, and the cut columns transposed."""
        middle = self.first + len(self.rows) * self.grid[1]
        rows = numbers[self.first : middle].view(len(self.rows), self.grid[1])
        return rows, numbers[middle : self.end].view(len(self.columns), self.grid[0])


class QuantizedShards:
    """The quantized parts of a model's shards: their layout on all ranks, and this rank's local tensors."""

    # A cell is a region with one scale. A block with no cut cell at its borders needs no communication. The largest
    # magnitudes of cut cells are combined over the model's ranks, and also of full weights if the format needs them.
    # The bits equal :meth:`Quantization.quantize` on the full weight.

    def __init__(
        self,
        layout: TransferLayout,
        local: Mapping[str, Tensor],
        quantization: Quantization,
        rank: int,
        groups: Sequence[ProcessGroup],
    ) -> None:
        self._quantization, self._groups, self._source = quantization, groups, local
        self._own: list[_OwnBlock] = []
        self._shared: dict[str, _Shared] = {}
        self._count = 0
        tensors: dict[str, CheckpointTensor] = {}
        blocks: dict[str, list[StoredBlock]] = {}
        for name, tensor in layout.tensors.items():
            stored = layout.blocks(name)
            if not (parts := quantization.parts(name, tensor.shape)):
                tensors[name], blocks[name] = tensor, list(stored)
                continue
            for part in parts:
                tensors[part.name] = CheckpointTensor(part.shape, str(part.dtype).removeprefix("torch."))
                blocks[part.name] = []
            count: dict[int, int] = {}
            for block in stored:
                number = count[block.rank] = count.get(block.rank, -1) + 1
                locals_ = tuple(f"{part.name}#{number}" for part in parts)  # no module has such a name
                for place, (part, part_name) in enumerate(zip(parts, locals_, strict=True)):
                    box, dims = _part_box(quantization, name, place, block), tuple(range(len(part.shape)))
                    blocks[part.name].append(StoredBlock(block.rank, box, part_name, (0,) * len(dims), dims))
                if block.rank == rank:
                    self._own.append(_OwnBlock(name, block, locals_))
            self._share(name, tensor.shape, stored)
        self.layout = TransferLayout(tensors, blocks)
        self.local = self._allocated(tensors, blocks, rank)

    def _share(self, name: str, shape: Sequence[int], stored: Sequence[StoredBlock]) -> None:
        """Record the shared magnitudes of a weight."""
        cut: list[tuple[int, ...]] = []  # the cells of each dim that a block's border cuts
        for dim, cell in enumerate(self._quantization.cell):
            borders = {border for block in stored for border in block.box[dim] if border != shape[dim]}
            cut.append(tuple(sorted({border // cell for border in borders if border % cell})))
        if self._quantization.needs_amax or cut[0] or cut[1]:
            amax = self._count if self._quantization.needs_amax else None
            first = self._count + (amax is not None)
            grid = [-(-size // cell) for size, cell in zip(shape, self._quantization.cell, strict=True)]
            self._shared[name] = shared = _Shared(amax, first, cut[0], cut[1], (grid[0], grid[1]))
            self._count = shared.end

    def _allocated(
        self, tensors: Mapping[str, CheckpointTensor], blocks: Mapping[str, Sequence[StoredBlock]], rank: int
    ) -> dict[str, Tensor]:
        local = dict(self._source)
        device = next((tensor.device for tensor in local.values()), torch.device("cpu"))
        for name, stored in blocks.items():
            for block in stored:
                if block.rank == rank and block.local not in local:
                    dtype = getattr(torch, tensors[name].dtype)
                    local[block.local] = torch.empty(box_shape(block.box), dtype=dtype, device=device)
        return local

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantize the current weights.  Collective over the model's ranks."""
        kept, numbers = self._magnitudes()
        for own in self._own:
            view = self._view(own)
            cells = kept.pop(id(own), None)
            if cells is None:
                cells = self._quantization.cell_amax(view, own.start)
            amax = cells.new_zeros(())
            shared = self._shared.get(own.weight)
            if shared is not None:
                for strip, part in self._strips(own, shared, numbers, cells.view(torch.int32)):
                    part.copy_(strip)
                amax = amax if shared.amax is None else numbers[shared.amax].view(torch.float32)
            parts = self._quantization.quantize_box(view, own.start, cells, amax)
            for local, part in zip(own.parts, parts, strict=True):
                self.local[local].copy_(part)

    def _view(self, own: _OwnBlock) -> Tensor:
        return block_view(self._source, own.weight, own.block, own.block.box)

    def _magnitudes(self) -> tuple[dict[int, Tensor], Tensor]:
        """The shared magnitudes of this rank's blocks, and the combined magnitudes of all ranks."""
        # Magnitudes are exchanged as float32 bits, read as integers: the order of non-negative floats is the same, with
        # NaN the largest. A maximum of floats may lose a NaN.
        device = next((self._view(own).device for own in self._own), torch.device("cpu"))
        numbers = torch.zeros(self._count, dtype=torch.int32, device=device)
        kept = {}
        for own in self._own:
            shared = self._shared.get(own.weight)
            if shared is None:
                continue
            # The absolute value clears the sign of a NaN, which reductions of floats may set.
            cells = self._quantization.cell_amax(self._view(own), own.start).abs()
            if shared.amax is not None:
                place = numbers[shared.amax : shared.amax + 1]
                torch.maximum(place, cells.view(torch.int32).max(), out=place)
            if shared.rows or shared.columns:
                kept[id(own)] = cells
                for strip, part in self._strips(own, shared, numbers, cells.view(torch.int32)):
                    torch.maximum(strip, part, out=strip)
        return kept, all_reduce_over(self._groups, numbers, dist.ReduceOp.MAX)

    def _strips(self, own: _OwnBlock, shared: _Shared, numbers: Tensor, cells: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of views of the same cells: one in the exchanged tensor, one in the cells of a block."""
        (top, bottom), (left, right) = _cell_box(self._quantization, own.block.box)
        rows, columns = shared.strips(numbers)
        strips = [(rows[i, left:right], cells[row - top]) for i, row in enumerate(shared.rows) if top <= row < bottom]
        return strips + [
            (columns[i, top:bottom], cells[:, column - left])
            for i, column in enumerate(shared.columns)
            if left <= column < right
        ]


def _cell_box(quantization: Quantization, box: Box) -> Box:
    """Range of cells that a box of a weight touches; a format without cells counts as one cell."""
    if quantization.cell == (1, 1):
        return ((0, 1), (0, 1))
    return tuple((start // cell, -(-stop // cell)) for (start, stop), cell in zip(box, quantization.cell, strict=True))


def _part_box(quantization: Quantization, name: str, place: int, block: StoredBlock) -> Box:
    """The box of a weight's part (0 values, 1 scales, 2 scale of the weight) for a block of the weight."""
    kind: QuantizationFormat = quantization.format
    if place == 2 or (place == 1 and kind == "fp8"):
        return ()
    if place == 1:
        return _cell_box(quantization, block.box)
    if kind != "nvfp4":
        return block.box
    rows, (start, stop) = block.box
    if start % 2 or stop % 2:
        raise OptionError(
            f"{name}: rank {block.rank} has columns {start} to {stop}, and nvfp4 stores two columns in a byte: give "
            f"keep=({name!r},) or another format, or shard columns in even parts"
        )
    return (rows, (start // 2, stop // 2))
