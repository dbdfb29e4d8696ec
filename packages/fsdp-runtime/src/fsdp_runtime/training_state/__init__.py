"""Checkpoints to resume training from: model, optimizer, scheduler and random states, on this mesh or another.

A checkpoint is a folder of safetensors files, one a rank, with a manifest in JSON; what is no tensor is read with
``torch.load(weights_only=True)``.  ``torch.distributed.checkpoint`` is not used, because it unpickles its metadata
and many of its values, and takes offsets from DTensor, whose arithmetic for uneven shards over ``tp`` differs from
where FSDP2 puts the rows (see ``sharded.shard_offsets``).
"""

from __future__ import annotations

from fsdp_runtime.training_state.load import TrainingState, load_training_state
from fsdp_runtime.training_state.save import save_training_state

__all__ = ["TrainingState", "load_training_state", "save_training_state"]
