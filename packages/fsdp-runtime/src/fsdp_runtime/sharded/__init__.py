"""Shards of tensors on ranks, their collectives and their files.  Other rooms import these names from here."""

from __future__ import annotations

from fsdp_runtime.sharded.async_saves import flat_bytes
from fsdp_runtime.sharded.boxes import BoxOwners, block_view, identity_chunk, inside, stored_part
from fsdp_runtime.sharded.collectives import (
    all_gather_objects,
    all_reduce_over,
    first_rank_speaks,
    model_mesh,
    own_rank,
    raise_on_all,
    world_ranks,
)
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.sharded.hashing import WORDS, hash_box
from fsdp_runtime.sharded.model_state import ModelState, StageRanks
from fsdp_runtime.sharded.safetensors_io import WeightInfo
from fsdp_runtime.sharded.saved_files import require_path
