"""Pack samples into the rows of data-parallel ranks, with equal work on each rank.

Calls:   ``pack`` (samples side by side), ``pack_tree`` (groups of samples, each shared prefix once)
Results: ``MicroBatches``, with the rows: ``PackedRow``, ``TreeRow`` and its ``GroupMember``
Errors:  ``SampleError``
"""

from __future__ import annotations

from fsdp_runtime.batching.micro_batches import MicroBatches
from fsdp_runtime.batching.packed_rows import PackedRow, pack
from fsdp_runtime.batching.packed_trees import pack_tree
from fsdp_runtime.batching.tree_row import GroupMember, TreeRow
from fsdp_runtime.errors import SampleError

__all__ = ["GroupMember", "MicroBatches", "PackedRow", "SampleError", "TreeRow", "pack", "pack_tree"]
