"""The blocks of matrices on ranks, the owner of each matrix, and buckets of matrices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from fsdp_runtime.sharded.rank_boxes import layout_key, rank_boxes
from tp_plans.boxes import Box

#: The load of an owner of a matrix that is on its rank already may exceed the mean by this share.
_SLACK = 1 / 16

Slices = tuple[slice, ...]
Indices = tuple[range, ...]


@dataclass(frozen=True)
class MatrixBlock:
    """A part of a matrix in the local tensor of some ranks."""

    place: Slices  # in the matrix
    local: Slices  # in the local tensor
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass
class Matrix:
    """One matrix of one parameter, with its blocks on all ranks."""

    number: int  # in the order of the parameters
    parameter: Tensor
    shape: tuple[int, ...]  # with a first dim of size 1 for a matrix of a stack of experts
    flops: int
    blocks: Sequence[MatrixBlock]
    is_transposed: bool
    owner: int = -1

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def out_in(self) -> tuple[int, int]:
        """The output and the input features."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.is_transposed else (rows, columns)

    def sender(self, block: MatrixBlock) -> int:
        """Return the rank that sends a block to the owner: the owner itself, or one of the replicas in turn."""
        return self.owner if self.owner in block.ranks else block.ranks[self.number % len(block.ranks)]

    @property
    def is_on_owner(self) -> bool:
        """Whether no rank but the owner holds a part."""
        return all(block.ranks == (self.owner,) for block in self.blocks)


class BlockFinder:
    """Finds the blocks of matrices; equal layouts, as in a model's layers, are computed once."""

    def __init__(self, everyone: Sequence[int]) -> None:
        self._everyone = everyone
        self._holders: dict[Hashable, dict[Box, list[int]]] = {}
        self._blocks: dict[Hashable, list[MatrixBlock]] = {}

    def blocks(self, parameter: Tensor, indices: Indices) -> list[MatrixBlock]:
        """Return the blocks of the matrix at some indices of a parameter; a block of replicas has all their ranks."""
        layout = layout_key(parameter)
        if layout not in self._holders:
            holders = self._holders[layout] = {}
            for rank, box in rank_boxes(parameter, self._everyone):
                if rank in self._everyone:
                    holders.setdefault(box, []).append(rank)
        if (layout, indices) not in self._blocks:
            first, last = indices[0][0], indices[0][-1]
            near = (
                (box, ranks) for box, ranks in self._holders[layout].items() if box[0][0] <= last and first < box[0][1]
            )
            blocks = (_block(indices, box, tuple(ranks)) for box, ranks in near)
            self._blocks[layout, indices] = [block for block in blocks if block.numel]
        return self._blocks[layout, indices]


def _block(indices: Indices, box: Box, ranks: tuple[int, ...]) -> MatrixBlock:
    place, local, shape = [], [], []
    for index, (start, stop) in zip(indices, box, strict=True):
        first, last = (min(len(index), max(0, -(-(side - index.start) // index.step))) for side in (start, stop))
        place.append(slice(first, last))
        begin = index.start + first * index.step - start
        local.append(slice(begin, begin + max(0, last - first - 1) * index.step + 1, index.step))
        shape.append(last - first)
    return MatrixBlock(tuple(place), tuple(local), tuple(shape), ranks)


def choose_owners(matrices: Sequence[Matrix], ranks: Sequence[int]) -> None:
    """Give each matrix to a rank with little work, preferably to a rank that holds most of it."""
    loads = dict.fromkeys(ranks, 0)
    most = sum(matrix.flops for matrix in matrices) / len(ranks) * (1 + _SLACK)
    for matrix in sorted(matrices, key=lambda matrix: (-matrix.flops, matrix.number)):
        held: dict[int, int] = {}
        for block in matrix.blocks:
            for rank in block.ranks:
                held[rank] = held.get(rank, 0) + block.numel
        largest = max(held.values())
        near = min((rank for rank, numel in held.items() if numel == largest), key=lambda rank: (loads[rank], rank))
        fits = loads[near] + matrix.flops <= most
        matrix.owner = near if fits else min(ranks, key=lambda rank: (loads[rank], rank))
        loads[matrix.owner] += matrix.flops


def make_buckets(matrices: Sequence[Matrix], limit: int) -> list[list[Matrix]]:
    """Divide matrices into buckets with at most ``limit`` elements per owner, or one matrix."""
    # Each owner has its largest matrices in the first bucket, so that the owners of a bucket have similar work.
    # Matrices without a transfer have buckets without a collective.
    buckets: list[list[Matrix]] = []
    for stays in (False, True):
        places: dict[int, tuple[int, int]] = {}
        part: list[list[Matrix]] = []
        chosen = (matrix for matrix in matrices if matrix.is_on_owner is stays)
        for matrix in sorted(chosen, key=lambda matrix: (-matrix.flops, matrix.number)):
            bucket, filled = places.get(matrix.owner, (0, 0))
            if filled and filled + matrix.numel > limit:
                bucket, filled = bucket + 1, 0
            places[matrix.owner] = bucket, filled + matrix.numel
            part += [[] for _ in range(bucket + 1 - len(part))]
            part[bucket].append(matrix)
        buckets += part
    return buckets
