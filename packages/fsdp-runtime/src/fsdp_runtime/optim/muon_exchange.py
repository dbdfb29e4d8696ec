"""Blocks of matrices sent to the owner of each matrix, and its update sent back: two collectives per bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.optim.muon_blocks import Block, Matrix

#: A block, and the ranks that it goes from and to.
_Move = tuple[Matrix, Block, int, int]


class Route:
    """This rank's part of the all-to-all of one bucket, the same in every step; without a group all blocks stay."""

    def __init__(self, moves: Iterable[_Move], group: ProcessGroup | None, rank: int) -> None:
        self.group = group
        ranks = [rank] if group is None else dist.get_process_group_ranks(group)
        places: Mapping[int, int] = {other: place for place, other in enumerate(ranks)}
        own = [move for move in moves if rank in move[2:]]
        sent = sorted((move for move in own if move[2] == rank), key=lambda move: places[move[3]])
        received = sorted((move for move in own if move[3] == rank), key=lambda move: places[move[2]])
        self.sent = [(matrix, block) for matrix, block, *_ in sent]
        self.received = [(matrix, block) for matrix, block, *_ in received]
        self.sent_sizes, self.received_sizes = [0] * len(ranks), [0] * len(ranks)
        for _, block, _, receiver in sent:
            self.sent_sizes[places[receiver]] += block.numel
        for _, block, sender, _ in received:
            self.received_sizes[places[sender]] += block.numel

    def start(
        self, read: Callable[[Matrix, Block], Tensor], dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Iterator[tuple[Matrix, Block, Tensor]]]:
        """Start the all-to-all; the result waits for it and iterates over the received blocks."""
        out = torch.empty(sum(self.sent_sizes), dtype=dtype, device=device)
        for view, (matrix, block) in zip(_views(out, self.sent), self.sent, strict=True):
            view.copy_(read(matrix, block))
        if self.group is None:
            return lambda: self._blocks(out, None)
        buffer = torch.empty(sum(self.received_sizes), dtype=dtype, device=device)
        work = dist.all_to_all_single(
            buffer, out, self.received_sizes, self.sent_sizes, group=self.group, async_op=True
        )
        return lambda: self._blocks(buffer, work)

    def _blocks(self, buffer: Tensor, work: dist.Work | None) -> Iterator[tuple[Matrix, Block, Tensor]]:
        if work is not None:
            work.wait()
        for view, (matrix, block) in zip(_views(buffer, self.received), self.received, strict=True):
            yield matrix, block, view


def _views(buffer: Tensor, blocks: Sequence[tuple[Matrix, Block]]) -> Iterator[Tensor]:
    start = 0
    for _, block in blocks:
        yield buffer[start : start + block.numel].view(block.shape)
        start += block.numel


def to_owners(bucket: Sequence[Matrix]) -> Iterator[_Move]:
    """Yield the moves of each block to the owner of its matrix."""
    for matrix in bucket:
        for block in matrix.blocks:
            yield matrix, block, matrix.sender(block), matrix.owner


def from_owners(bucket: Sequence[Matrix]) -> Iterator[_Move]:
    """Yield the moves of each block from the owner of its matrix to every rank that holds it."""
    for matrix in bucket:
        for block in matrix.blocks:
            for rank in block.ranks:
                yield matrix, block, matrix.owner, rank
