"""The ranks of a model in pipeline stages, and the full tensors of one stage on the ranks of all stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.model.stages import stages_of
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.sharded.async_saves import flat_bytes
from fsdp_runtime.sharded.collectives import ModelRanks, own_rank
from fsdp_runtime.sharded.gather import full_tensors


@dataclass(frozen=True)
class StageRanks:
    """The ranks of a mesh with an axis ``pp``; a line has one rank of each stage."""

    mesh: DeviceMesh

    @staticmethod
    def of(model: nn.Module) -> StageRanks | None:
        """Return the ranks of a model in pipeline stages, ``None`` for any other model."""
        return None if stages_of(model) is None else StageRanks(runtime_state(model).mesh)

    @property
    def table(self) -> Tensor:
        """Global ranks, ``[pp, ranks of a stage]``."""
        return self.mesh.mesh.movedim((self.mesh.mesh_dim_names or ()).index("pp"), 0).flatten(1)

    @property
    def group(self) -> ProcessGroup:
        """The process group of this rank's line."""
        return self.mesh.get_group("pp")

    @property
    def line(self) -> ModelRanks:
        """The ranks of this rank's line."""
        ranks = self.line_of(own_rank())
        return ModelRanks([self.group], ranks.index(own_rank()), len(ranks), ranks[0])

    @property
    def own(self) -> list[int]:
        """The ranks with the same stages as this rank."""
        return next(ranks for ranks in self.table.tolist() if own_rank() in ranks)

    @property
    def stage(self) -> ModelRanks:
        """The ranks with the same stages as this rank."""
        axes = [axis for axis, name in enumerate(self.mesh.mesh_dim_names or ()) if name != "pp"]
        groups = [self.mesh.get_group(axis) for axis in axes if self.mesh.size(axis) > 1]
        return ModelRanks(groups, self.own.index(own_rank()), len(self.own), self.own[0])

    def foreign(self, entries: Sequence[StateEntry]) -> set[str]:
        """Return the names of the tensors that other stages save; one stage saves a tensor of several."""
        return {entry.names[0] for entry in entries if entry.ranks is not None and entry.ranks[0] not in self.own}

    def line_of(self, rank: int) -> list[int]:
        """Return the ranks of the line with a rank, first stage first."""
        return next(line for line in self.table.T.tolist() if rank in line)

    def full_tensors(
        self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], holders: Collection[int], to: int | None
    ) -> Iterator[Tensor]:
        """Return an iterator over the full tensors of ``holders``, on all ranks or on ``to``.  Collective."""
        # The first stage with the tensors gathers them; then its rank of each line sends them along the line.
        own, group, device = own_rank(), self.group, self.mesh.device_type
        source = next(rank for rank in self.line_of(own) if rank in holders)
        target = None if to is None else next(rank for rank in self.line_of(to) if rank in holders)
        full = full_tensors(tensors, dtypes=dtypes, to=target) if source == own else None

        def passed_on() -> Iterator[Tensor]:
            for tensor, dtype in zip(tensors, dtypes, strict=True):
                shape = tensor.shape if to in (None, own) else (0,)
                values = torch.empty(shape, dtype=dtype, device=device) if full is None else next(full).to(device)
                data = flat_bytes(values)
                if to is None:
                    dist.broadcast(data, source, group=group)
                elif own == target:
                    dist.send(data, to, group=group)
                elif own == to:
                    dist.recv(data, target, group=group)
                yield values

        return passed_on()
