"""The state of a model, read once for a load, a save or an export: tensors, ranks, pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby

from torch import Tensor, nn

from fsdp_runtime._peft_compat import BaseModel, base_of
from fsdp_runtime.model.stages import recorded_meshes, whole_entries
from fsdp_runtime.model.state import StateEntry, state_entries
from fsdp_runtime.sharded.collectives import ModelRanks, model_mesh, ranks_of, world_ranks
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.sharded.stages import StageRanks


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
