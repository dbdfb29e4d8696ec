"""Shards of tensors on ranks, their collectives and their files.  Other rooms import these names from here."""

from __future__ import annotations

from fsdp_runtime.sharded.async_saves import flat_bytes as flat_bytes
from fsdp_runtime.sharded.chunks import identity_chunk as identity_chunk
from fsdp_runtime.sharded.chunks import inside as inside
from fsdp_runtime.sharded.collectives import all_gather_objects as all_gather_objects
from fsdp_runtime.sharded.collectives import all_reduce_over as all_reduce_over
from fsdp_runtime.sharded.collectives import first_rank_speaks as first_rank_speaks
from fsdp_runtime.sharded.collectives import model_mesh as model_mesh
from fsdp_runtime.sharded.collectives import own_rank as own_rank
from fsdp_runtime.sharded.collectives import raise_on_all as raise_on_all
from fsdp_runtime.sharded.collectives import world_ranks as world_ranks
from fsdp_runtime.sharded.gather import full_tensors as full_tensors
from fsdp_runtime.sharded.hashing import WORDS as WORDS
from fsdp_runtime.sharded.hashing import hash_box as hash_box
from fsdp_runtime.sharded.model_state import ModelState as ModelState
from fsdp_runtime.sharded.paths import require_path as require_path
from fsdp_runtime.sharded.rank_boxes import BoxOwners as BoxOwners
from fsdp_runtime.sharded.rank_boxes import block_view as block_view
from fsdp_runtime.sharded.rank_boxes import stored_part as stored_part
from fsdp_runtime.sharded.safetensors_io import WeightInfo as WeightInfo
from fsdp_runtime.sharded.stages import StageRanks as StageRanks
