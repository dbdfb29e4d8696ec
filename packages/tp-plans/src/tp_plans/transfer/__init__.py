"""Transfers of weights between two layouts, as data: each block's tensor, sender and receiver.

A layout:      ``TransferLayout``, ``CheckpointTensor``, ``StoredBlock``
Of a mesh:     ``mesh_layout``, ``mesh_boxes``, ``MeshLayout``, ``ShardStep``, ``shard_steps``, ``StridedShard``
Of an engine:  ``engine_layout``, ``EngineSize``, ``engine_rules``, ``EngineRule``
A transfer:    ``plan_transfer``, ``plan_cover``, ``TransferPlan``, ``BlockTransfer``
Boxes:         ``Box``, ``full_box``, ``box_shape``, ``volume``, ``intersection``, ``split_box``
Errors:        ``TransferError``

Import names from ``tp_plans.transfer``; the modules below it may move.  None of them needs torch.
"""

from __future__ import annotations

from tp_plans.errors import TransferError
from tp_plans.transfer.block_transfer import BlockTransfer
from tp_plans.transfer.boxes import Box, box_shape, full_box, intersection, split_box, volume
from tp_plans.transfer.engines import EngineSize, engine_layout
from tp_plans.transfer.layout import CheckpointTensor, TransferLayout, mesh_layout
from tp_plans.transfer.patterns import StoredBlock
from tp_plans.transfer.placements import MeshLayout, ShardStep, StridedShard, mesh_boxes, shard_steps
from tp_plans.transfer.plan import TransferPlan, plan_cover, plan_transfer
from tp_plans.transfer.rules import EngineRule, engine_rules

__all__ = [
    "BlockTransfer",
    "Box",
    "CheckpointTensor",
    "EngineRule",
    "EngineSize",
    "MeshLayout",
    "ShardStep",
    "StoredBlock",
    "StridedShard",
    "TransferError",
    "TransferLayout",
    "TransferPlan",
    "box_shape",
    "engine_layout",
    "engine_rules",
    "full_box",
    "intersection",
    "mesh_boxes",
    "mesh_layout",
    "plan_cover",
    "plan_transfer",
    "shard_steps",
    "split_box",
    "volume",
]
