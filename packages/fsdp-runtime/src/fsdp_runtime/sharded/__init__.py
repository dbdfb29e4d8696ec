"""Shards of tensors on ranks, their collectives and their files.  Other rooms import these names from here."""

from __future__ import annotations

from fsdp_runtime.sharded.async_saves import flat_bytes
from fsdp_runtime.sharded.chunks import identity_chunk, inside
from fsdp_runtime.sharded.collectives import (
    all_gather_objects,
    all_reduce_over,
    first_rank_speaks,
    mesh_ranks,
    model_mesh,
    own_rank,
    raise_on_all,
    world_ranks,
)
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.sharded.hashing import WORDS, hash_box
from fsdp_runtime.sharded.paths import require_path
from fsdp_runtime.sharded.rank_boxes import BoxOwners, block_view, stored_part
from fsdp_runtime.sharded.safetensors_io import WeightInfo

__all__ = [
    "WORDS",
    "BoxOwners",
    "WeightInfo",
    "all_gather_objects",
    "all_reduce_over",
    "block_view",
    "first_rank_speaks",
    "flat_bytes",
    "full_tensors",
    "hash_box",
    "identity_chunk",
    "inside",
    "mesh_ranks",
    "model_mesh",
    "own_rank",
    "raise_on_all",
    "require_path",
    "stored_part",
    "world_ranks",
]
