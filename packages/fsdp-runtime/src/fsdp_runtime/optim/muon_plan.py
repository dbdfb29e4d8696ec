"""The work of one Muon step: owners, buckets and exchanges, planned once for a set of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import group_of_axes, root_mesh
from fsdp_runtime.errors import OptionError
from fsdp_runtime.optim.muon_blocks import Block, BlockFinder, Matrix, choose_owners, make_buckets
from fsdp_runtime.optim.muon_exchange import Route, from_owners, to_owners
from fsdp_runtime.optim.newton_schulz import iteration_flops
from fsdp_runtime.optim.roles import StoredMatrices
from fsdp_runtime.sharded.collectives import (
    ModelRanks,
    all_gather_objects,
    own_rank,
    require_equal_on_all,
    required_device,
)


@dataclass(frozen=True)
class _Bucket:
    owned: Sequence[Matrix]  # by this rank
    to_owners: Route
    from_owners: Route


class MuonPlan:
    """The matrices of some parameters, with the ranks that orthogonalize them."""

    def __init__(self, stored: Mapping[Tensor, StoredMatrices], steps: Mapping[Tensor, int], limit: int) -> None:
        self.parameters, rank = list(stored), own_rank()
        self.group = group_of(self.parameters)
        ranks = [rank] if self.group is None else dist.get_process_group_ranks(self.group)
        finder = BlockFinder(ranks)
        self.matrices: list[Matrix] = []
        for parameter in self.parameters:
            for indices in stored[parameter].indices(tuple(parameter.shape)):
                shape = tuple(map(len, indices))
                flops = iteration_flops(shape[-2], shape[-1], steps[parameter])
                blocks = finder.blocks(parameter, indices)
                self.matrices.append(
                    Matrix(len(self.matrices), parameter, shape, flops, blocks, stored[parameter].is_transposed)
                )
        choose_owners(self.matrices, ranks)
        self.buckets = [
            _Bucket(
                [matrix for matrix in bucket if matrix.owner == rank],
                *(
                    Route(moves(bucket), None if all(m.is_on_owner for m in bucket) else self.group, rank)
                    for moves in (to_owners, from_owners)
                ),
            )
            for bucket in make_buckets(self.matrices, limit)
        ]

    def run(
        self,
        read: Callable[[Matrix, Block], Tensor],
        orthogonalize: Callable[[Matrix, Tensor], Tensor],
        apply: Callable[[Matrix, Block, Tensor], None],
        dtype: torch.dtype,
    ) -> None:
        """Send the blocks of each bucket while the matrices of the earlier bucket are orthogonalized."""
        if not self.matrices:
            return
        local = self.matrices[0].parameter
        device = required_device([] if self.group is None else [self.group]) or local.device
        arriving = self.buckets[0].to_owners.start(read, dtype, device)
        returning: Callable[[], Iterator[tuple[Matrix, Block, Tensor]]] = lambda: iter(())  # noqa: E731
        for bucket, following in zip(self.buckets, [*self.buckets[1:], None], strict=True):
            blocks = arriving()
            if following is not None:
                arriving = following.to_owners.start(read, dtype, device)
            full = {m.number: torch.empty(m.shape, dtype=dtype, device=device) for m in bucket.owned}
            for matrix, block, values in blocks:
                full[matrix.number][block.place].copy_(values)
            for matrix in bucket.owned:
                full[matrix.number] = orthogonalize(matrix, full[matrix.number])
            started = bucket.from_owners.start(partial(_part, full), dtype, device)
            for update in returning():
                apply(*update)
            returning = started
        for update in returning():
            apply(*update)


def _part(full: Mapping[int, Tensor], matrix: Matrix, block: Block) -> Tensor:
    return full[matrix.number][block.place]


def require_same_gradients(stored: Mapping[Tensor, StoredMatrices]) -> None:
    """Raise on all ranks unless the ranks have gradients of the same matrices."""
    if (group := group_of(list(stored))) is not None:
        numbered = enumerate(stored.items())
        gradients = {
            f"the gradient of {matrices.path or f'matrix {number}'}": "missing" if parameter.grad is None else "present"
            for number, (parameter, matrices) in numbered
        }
        require_equal_on_all(all_gather_objects(ModelRanks((group,)), gradients))


def group_of(parameters: Sequence[Tensor]) -> ProcessGroup | None:
    """Return the group of all ranks of the parameters' mesh, ``None`` for one rank."""
    meshes = {root_mesh(parameter.device_mesh) for parameter in parameters if isinstance(parameter, DTensor)}
    ranks = [sorted(mesh.mesh.flatten().tolist()) for mesh in meshes]
    if any(other != ranks[0] for other in ranks):
        raise OptionError(
            f"the parameters are on meshes with different ranks, {ranks[0]} and {ranks[-1]}: give each mesh an "
            "optimizer of its parameters"
        )
    if not ranks or len(ranks[0]) == 1:
        return None
    if len(ranks[0]) == dist.get_world_size():
        return dist.group.WORLD
    return group_of_axes(next(iter(meshes)))
