"""The work of one Muon step, planned once for a set of parameters: blocks, owners and buckets of matrices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import group_of_axes
from fsdp_runtime.errors import OptionError
from fsdp_runtime.optim.roles import StoredMatrices
from fsdp_runtime.sharded import collectives
from fsdp_runtime.sharded.boxes import BoxOwners, layout_key
from fsdp_runtime.steps.guards.calls import models_with
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
        self._everyone, self._owners = everyone, BoxOwners(everyone)
        self._blocks: dict[Hashable, list[MatrixBlock]] = {}

    def blocks(self, parameter: Tensor, indices: Indices) -> list[MatrixBlock]:
        """Return the blocks of the matrix at some indices of a parameter; a block of replicas has all their ranks."""
        key = layout_key(parameter), indices
        if key not in self._blocks:
            near = self._owners.near(parameter, tuple((index[0], index[-1] + 1) for index in indices))
            boxes = ((box, tuple(rank for rank in ranks if rank in self._everyone)) for box, ranks in near)
            blocks = (_block(indices, box, ranks) for box, ranks in boxes if ranks)
            self._blocks[key] = [block for block in blocks if block.numel]
        return self._blocks[key]


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


Read = Callable[[Matrix, MatrixBlock], Tensor]
#: The sender and the receiver of a block, and the block.
_Move = tuple[tuple[int, int], Matrix, MatrixBlock]
_Received = Iterator[tuple[Matrix, MatrixBlock, Tensor]]


class MuonPlan:
    """The matrices of some parameters, with the ranks that orthogonalize them."""

    def __init__(self, stored: Mapping[Tensor, StoredMatrices], steps: Mapping[Tensor, int], limit: int) -> None:
        self.parameters, self.group = list(stored), group_of(list(stored))
        ranks = _ranks_of(self.group)
        finder = BlockFinder(ranks)
        self.matrices: list[Matrix] = []
        for parameter, matrices in stored.items():
            for indices in matrices.indices(tuple(parameter.shape)):
                shape = tuple(map(len, indices))
                low, high = sorted(shape[-2:])
                flops = steps[parameter] * (4 * low * low * high + 2 * low**3)
                blocks, number = finder.blocks(parameter, indices), len(self.matrices)
                self.matrices.append(Matrix(number, parameter, shape, flops, blocks, matrices.is_transposed))
        choose_owners(self.matrices, ranks)
        self.buckets = [_Bucket(bucket, self.group) for bucket in make_buckets(self.matrices, limit)]

    def run(
        self,
        read: Read,
        orthogonalize: Callable[[Matrix, Tensor], Tensor],
        apply: Callable[[Matrix, MatrixBlock, Tensor], None],
        dtype: torch.dtype,
    ) -> None:
        """Send the blocks of each bucket while the matrices of the earlier bucket are orthogonalized."""
        groups = [] if self.group is None else [self.group]
        device = collectives.required_device(groups) or (self.parameters[0].device if self.parameters else None)
        arriving = [bucket.to_owners.start(read, dtype, device) for bucket in self.buckets[:1]]
        returning: list[Callable[[], _Received]] = []
        for bucket, following in zip(self.buckets, [*self.buckets[1:], None], strict=True):
            blocks = arriving.pop()()
            if following is not None:
                arriving.append(following.to_owners.start(read, dtype, device))
            full = {m.number: torch.empty(m.shape, dtype=dtype, device=device) for m in bucket.owned}
            for matrix, block, values in blocks:
                full[matrix.number][block.place].copy_(values)
            for matrix in bucket.owned:
                full[matrix.number] = orthogonalize(matrix, full[matrix.number])
            returning.append(bucket.from_owners.start(partial(_part, full), dtype, device))
            for update in returning.pop(0)() if len(returning) > 1 else ():
                apply(*update)
        for update in (update for last in returning for update in last()):
            apply(*update)


class _Bucket:
    def __init__(self, matrices: Sequence[Matrix], group: ProcessGroup | None) -> None:
        group, rank = None if all(matrix.is_on_owner for matrix in matrices) else group, collectives.own_rank()
        self.owned = [matrix for matrix in matrices if matrix.owner == rank]
        blocks = [(matrix, block) for matrix in matrices for block in matrix.blocks]
        sent = [((matrix.sender(block), matrix.owner), matrix, block) for matrix, block in blocks]
        self.to_owners = _AllToAll([move for move in sent if rank in move[0]], group)
        own = [((rank, other), matrix, b) for matrix in self.owned for b in matrix.blocks for other in b.ranks]
        received = [((m.owner, rank), m, block) for m, block in blocks if m.owner != rank and rank in block.ranks]
        self.from_owners = _AllToAll(own + received, group)


class _AllToAll:
    """One all-to-all of blocks; without a group every block stays."""

    def __init__(self, moves: Sequence[_Move], group: ProcessGroup | None) -> None:
        self.group = group
        self.sent, self.sent_sizes = self._side(moves, own=0)
        self.received, self.received_sizes = self._side(moves, own=1)

    def _side(self, moves: Sequence[_Move], own: int) -> tuple[list[tuple[Matrix, MatrixBlock]], list[int]]:
        """Return the blocks that this rank sends, or receives, by the other rank, and the elements per rank."""
        sizes = dict.fromkeys(_ranks_of(self.group), 0)
        place = {rank: index for index, rank in enumerate(sizes)}
        part = [move for move in moves if move[0][own] == collectives.own_rank()]
        for ends, _, block in part:
            sizes[ends[1 - own]] += block.numel
        part.sort(key=lambda move: (place[move[0][1 - own]], move[1].number))
        return [move[1:] for move in part], list(sizes.values())

    def start(self, read: Read, dtype: torch.dtype, device: torch.device | None) -> Callable[[], _Received]:
        """Start the all-to-all; the result waits for it and iterates over the received blocks."""
        out = torch.empty(sum(self.sent_sizes), dtype=dtype, device=device)
        for matrix, block, view in _views(out, self.sent):
            view.copy_(read(matrix, block))
        if self.group is None:
            return lambda: _views(out, self.received)
        buffer = torch.empty(sum(self.received_sizes), dtype=dtype, device=device)
        work = dist.all_to_all_single(
            buffer, out, self.received_sizes, self.sent_sizes, group=self.group, async_op=True
        )
        return lambda: _views(buffer, self.received, work)


def _views(buffer: Tensor, blocks: Sequence[tuple[Matrix, MatrixBlock]], work: dist.Work | None = None) -> _Received:
    if work is not None:
        work.wait()
    start = 0
    for matrix, block in blocks:
        yield matrix, block, buffer[start : start + block.numel].view(block.shape)
        start += block.numel


def _part(full: Mapping[int, Tensor], matrix: Matrix, block: MatrixBlock) -> Tensor:
    return full[matrix.number][block.place]


def require_same_gradients(stored: Mapping[Tensor, StoredMatrices]) -> None:
    """Raise on all ranks unless the ranks have gradients of the same matrices."""
    if (group := group_of(list(stored))) is not None:
        gradients = {
            f"the gradient of {matrices.path or f'matrix {number}'}": "missing" if parameter.grad is None else "present"
            for number, (parameter, matrices) in enumerate(stored.items())
        }
        ranks = collectives.ModelRanks((group,))
        collectives.require_equal_on_all(collectives.all_gather_objects(ranks, gradients))


def group_of(parameters: Sequence[Tensor]) -> ProcessGroup | None:
    """Return the group of all ranks of the parameters' mesh and pipeline stage, ``None`` for one rank."""
    # Only ``parallelize`` says that the ranks of the other axes of a sliced mesh have the same values.
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    models = models_with(parameters)
    roots = (mesh for model in models if (mesh := collectives.model_mesh(model, parameters)) is not None)
    meshes = {stage for mesh in roots if (stage := _of_stage(mesh)) is not None} or meshes
    ranks = {tuple(sorted(mesh.mesh.flatten().tolist())): mesh for mesh in meshes}
    if len(ranks) > 1:
        listed = " and ".join(map(str, sorted(ranks)))
        raise OptionError(f"the parameters are on meshes of the ranks {listed}: shard the model by parallelize")
    if not meshes or len(next(iter(ranks))) == 1:
        return None
    return dist.group.WORLD if len(next(iter(ranks))) == dist.get_world_size() else group_of_axes(next(iter(meshes)))


def _of_stage(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh of this rank's pipeline stages, ``None`` for one rank per stage."""
    names = mesh.mesh_dim_names or ()
    axes = tuple(axis for axis in names if axis != "pp")
    if axes == names:
        return mesh
    return mesh[axes] if axes else None


def _ranks_of(group: ProcessGroup | None) -> list[int]:
    return [collectives.own_rank()] if group is None else dist.get_process_group_ranks(group)
