"""The state of a whole model, recorded before a rank loses the tensors of other stages."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.model.state import StateEntry, state_entries
from fsdp_runtime.sharded.stages import StageRanks
from fsdp_runtime.steps.pipeline.copies import absent_tensors
from fsdp_runtime.steps.pipeline.parts import StagedModel


def recorded_state(model: nn.Module, staged: StagedModel, mesh: DeviceMesh) -> tuple[StateEntry, ...]:
    """Return the state entries of the whole model with empty tensors, and the ranks with each tensor."""
    table = StageRanks(mesh).table.tolist()
    absent = [{id(slot.tensor) for slot in absent_tensors(model, staged, rank)} for rank in range(len(table))]
    entries = []
    for entry in state_entries(model):
        holders = [rank for rank, tensors in enumerate(absent) if id(entry.tensor) not in tensors]
        ranks = sorted(rank for holder in holders for rank in table[holder])
        is_absent = staged.rank not in holders
        entries.append(replace(entry, tensor=_empty(entry.tensor), ranks=tuple(ranks), is_absent=is_absent))
    return tuple(entries)


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
