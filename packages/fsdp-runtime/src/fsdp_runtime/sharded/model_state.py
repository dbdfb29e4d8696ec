"""The state of a model, read once for a load, a save or an export: tensors, ranks, pipeline stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._peft_compat import BaseModel, base_of
from fsdp_runtime.model.stages import recorded_meshes, stages_of, whole_entries
from fsdp_runtime.model.state import StateEntry, state_entries
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.sharded.async_saves import flat_bytes
from fsdp_runtime.sharded.collectives import ModelRanks, model_mesh, own_rank, ranks_of, world_ranks
from fsdp_runtime.sharded.gather import full_tensors


class ModelState:
    """A model's state entries, and the mesh and ranks that hold them."""

    def __init__(self, model: nn.Module, *, allow_offloaded: bool = False) -> None:
        self.model = model
        self.entries = state_entries(model, allow_offloaded=allow_offloaded)  # of this rank
        self.mesh = model_mesh(model, [entry.tensor for entry in self.entries])

    @cached_property
    def ranks(self) -> ModelRanks:
        """All ranks of the model's mesh, replicas included; only this rank for a model of plain tensors."""
        return ranks_of(self.mesh)

    @cached_property
    def writers(self) -> ModelRanks:
        """The ranks that write a checkpoint: the mesh's ranks, or the world for a model without a mesh."""
        # A model, or a part of a model, that was parallelized on a mesh of one rank has plain tensors.
        on_mesh = self.mesh is not None or any(mesh.size() == 1 for mesh in recorded_meshes(self.model))
        return self.ranks if on_mesh else world_ranks()

    @cached_property
    def base(self) -> BaseModel:
        """The model inside a ``PeftModel``, or the model itself."""
        return base_of(self.model)

    @cached_property
    def stages(self) -> StageRanks | None:
        """The ranks of the pipeline stages; an error for a part of a model in stages."""
        return StageRanks.of(self.model)

    @cached_property
    def whole(self) -> Sequence[StateEntry]:
        """The state entries of all pipeline stages, equal on every rank; an error where a stage was changed."""
        return whole_entries(self.model, self.entries)

    @cached_property
    def holders(self) -> dict[int, tuple[int, ...] | None]:
        """The global ranks with each tensor of :attr:`whole`, by the tensor's id; ``None`` for all ranks."""
        return {id(entry.tensor): entry.ranks for entry in self.whole}

    def full_tensors(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Iterate over the full tensors of entries of :attr:`whole`, on every rank.  Collective."""
        for ranks, members in groupby(tensors, lambda tensor: self.holders[id(tensor)]):
            run = list(members)
            if self.stages is None or ranks is None:
                yield from full_tensors(run)
            else:
                yield from self.stages.full_tensors(run, [tensor.dtype for tensor in run], ranks, None)


@dataclass(frozen=True)
class StageRanks:
    """The ranks of a mesh with an axis ``pp``; a line has one rank of each stage."""

    mesh: DeviceMesh

    @staticmethod
    def of(model: nn.Module) -> StageRanks | None:
        """Return the ranks of a model in pipeline stages, ``None`` for any other model."""
        return None if stages_of(model) is None else StageRanks(runtime_state(model).mesh)

    @property
    def table(self) -> list[list[int]]:
        """Global ranks, ``[pp, ranks of a stage]``."""
        ranks = self.mesh.mesh.movedim((self.mesh.mesh_dim_names or ()).index("pp"), 0)
        return ranks.flatten(1).tolist()

    @property
    def line(self) -> ModelRanks:
        """The ranks of this rank's line."""
        ranks = self.line_of(own_rank())
        return ModelRanks([self.mesh.get_group("pp")], ranks.index(own_rank()), len(ranks), ranks[0])

    @property
    def own(self) -> list[int]:
        """The ranks with the same stages as this rank."""
        return next(ranks for ranks in self.table if own_rank() in ranks)

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
        return next([*line] for line in zip(*self.table, strict=True) if rank in line)

    def full_tensors(
        self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], holders: Collection[int], to: int | None
    ) -> Iterator[Tensor]:
        """Return an iterator over the full tensors of ``holders``, on all ranks or on ``to``.  Collective."""
        # The first stage with the tensors gathers them; then its rank of each line sends them along the line.
        own, group, device = own_rank(), self.mesh.get_group("pp"), self.mesh.device_type
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
