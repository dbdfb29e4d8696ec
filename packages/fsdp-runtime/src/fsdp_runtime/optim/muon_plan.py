"""The work of one Muon step: owners, buckets and exchanges, planned once for a set of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import group_of_axes
from fsdp_runtime.errors import OptionError
from fsdp_runtime.optim.muon_blocks import BlockFinder, Matrix, MatrixBlock, choose_owners, make_buckets
from fsdp_runtime.optim.newton_schulz import iteration_flops
from fsdp_runtime.optim.roles import StoredMatrices
from fsdp_runtime.sharded import collectives
from fsdp_runtime.steps.guards.optimizers import models_with

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
                flops = iteration_flops(shape[-2], shape[-1], steps[parameter])
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
    """A bucket of matrices, with its two all-to-alls."""

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
