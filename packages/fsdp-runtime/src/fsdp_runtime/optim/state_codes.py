"""Moments of Adam in bfloat16, or in 8 bits with a scale per block of a row of the full parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import has_values
from fsdp_runtime.sharded.chunks import local_part
from tp_plans.boxes import Box

#: The ends of codes in a state: a moment is stored as ``exp_avg``, its scales as ``exp_avg_scale``.
SCALE = "_scale"
_tables: dict[tuple[bool, torch.device], tuple[Tensor, Tensor]] = {}


@cache
def dynamic_levels(*, signed: bool) -> tuple[float, ...]:
    """Return the 256 values of a code: seven decades with ever finer steps ("8-bit Optimizers", arXiv:2110.02861)."""
    levels = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        values = [(0.1 + 0.9 * (step + 0.5) / count) * 10.0 ** (decade - 6) for step in range(count)]
        levels += [*values, *(-value for value in values)] if signed else values
    return tuple(sorted(levels))


@dataclass(frozen=True)
class Blocks:
    """The blocks of one parameter's rows, and this rank's part of them."""

    size: int  # elements of a block; the last block of a row may be shorter
    columns: range  # of this rank, in the full row
    count: int  # blocks of a full row
    reduce: Callable[[Tensor], None] | None  # the maximum over the ranks that hold the other columns

    @classmethod
    def of(cls, parameter: Tensor, size: int) -> Blocks:
        """Return the blocks of a parameter, which its full shape decides."""
        _, box = local_part(parameter)
        groups = []
        if isinstance(parameter, DTensor):
            mesh, last = parameter.device_mesh, parameter.ndim - 1
            dims = enumerate(getattr(placement, "dim", None) for placement in parameter.placements)
            groups = [mesh.get_group(axis) for axis, dim in dims if dim == last and mesh.size(axis) > 1]

        def reduce(amax: Tensor) -> None:
            for group in groups:
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)

        columns = range(*box[-1]) if box[-1][1] > box[-1][0] else range(0)
        return cls(size, columns, -(-parameter.shape[-1] // size), reduce if groups else None)

    def amax(self, values: Tensor) -> Tensor:
        """Return the largest magnitude of each block ``[rows, blocks]`` over all ranks."""
        amax = values.new_zeros((len(values), self.count))
        if values.numel():
            before, first = self.columns.start % self.size, self.columns.start // self.size
            after = -(before + len(self.columns)) % self.size
            padded = torch.nn.functional.pad(values.abs(), (before, after)).view(len(values), -1, self.size)
            amax[:, first : first + padded.shape[1]] = padded.amax(-1)
        if self.reduce is not None:
            self.reduce(amax)
        return amax

    def per_element(self, scales: Tensor) -> Tensor:
        """Return the scale of each of this rank's elements ``[rows, columns]``."""
        start, stop = self.columns.start, self.columns.stop
        first, last = start // self.size, -(-stop // self.size)
        expanded = scales[:, first:last].repeat_interleave(self.size, 1)
        return expanded[:, start - first * self.size : stop - first * self.size]


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return float32 values of codes ``[rows, columns]`` and their elements' scales."""
    levels, _ = _table(codes.device, signed=signed)
    return levels.index_select(0, codes.reshape(-1).int()).view(codes.shape).mul_(scales)


def encode(values: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the codes of values: the nearest level of each value's share of its scale."""
    _, middles = _table(values.device, signed=signed)
    shares = values / torch.where(scales == 0, 1.0, scales)
    return torch.bucketize(shares, middles, out_int32=True).to(torch.uint8)


def _table(device: torch.device, *, signed: bool) -> tuple[Tensor, Tensor]:
    key = signed, device
    if (table := _tables.get(key)) is None:
        levels = torch.tensor(dynamic_levels(signed=signed), dtype=torch.float64)
        table = levels.to(device, torch.float32), ((levels[1:] + levels[:-1]) / 2).to(device, torch.float32)
        if has_values(table[0]):
            _tables[key] = table
    return table


def round_stochastically(values: Tensor, parameter: Tensor, box: Box, seed: int) -> Tensor:
    """Round float32 values to bfloat16 up or down, with probabilities that keep their mean."""
    # A hash of the seed and of an element's index in the full parameter draws, so that no mesh changes a draw.
    index = _full_index(parameter.shape, box, values.device).view(values.shape)
    mixed = index.mul_(-0x61C8864680B583EB).add_(seed * 0x632BE59BD9B4E019 % 2**63)
    mixed ^= (mixed >> 31) & 0x1FFFFFFFF
    mixed.mul_(-0x40A7B892E31B1A47)
    drawn = ((mixed >> 32) & 0xFFFF).to(torch.int32)
    rounded = ((values.view(torch.int32) + drawn) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _full_index(shape: Sequence[int], box: Box, device: torch.device) -> Tensor:
    """Return the index in the flat full tensor of each element of a box."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, (start, stop) in zip(shape, box, strict=True):
        index = (index * size)[..., None] + torch.arange(start, stop, device=device)
    return index.contiguous()
