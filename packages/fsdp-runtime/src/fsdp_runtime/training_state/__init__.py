"""Checkpoints to resume training from: model, optimizer, scheduler and RNG states, on the same or another mesh.

A training state is a directory of safetensors files, one per rank, with a JSON manifest; other values are read with
``torch.load(weights_only=True)``.  ``torch.distributed.checkpoint`` is not used: it unpickles its metadata and many
values, and takes offsets from DTensor.  DTensor's arithmetic for uneven shards over ``tp`` differs from FSDP2's layout
(see ``sharded.boxes``).
"""

from __future__ import annotations

from fsdp_runtime.training_state.load import TrainingState, load_training_state
from fsdp_runtime.training_state.save import save_training_state

__all__ = ["TrainingState", "load_training_state", "save_training_state"]
