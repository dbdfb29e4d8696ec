"""Transfers of weights between two layouts, as data: each block's tensor, sender and receiver.

A layout:      ``TransferLayout``, ``CheckpointTensor``, ``StoredBlock``
Of a mesh:     ``mesh_layout``
Of an engine:  ``engine_layout``, ``EngineSize``, ``engine_rules``, ``EngineRule``
A transfer:    ``plan_transfer``, ``plan_cover``, ``TransferPlan``, ``BlockTransfer``
Errors:        ``TransferError``

Import names from ``tp_plans.transfer``; its modules may move.  Boxes are in ``tp_plans.boxes``.  Torch is not needed.
"""

from __future__ import annotations

from typing import Any

from tp_plans.errors import TransferError
from tp_plans.transfer.engines import EngineSize, engine_layout
from tp_plans.transfer.layout import CheckpointTensor, TransferLayout, mesh_layout
from tp_plans.transfer.patterns import StoredBlock
from tp_plans.transfer.plan import BlockTransfer, TransferPlan, plan_cover, plan_transfer
from tp_plans.transfer.rules import EngineRule, engine_rules

__all__ = ["BlockTransfer", "CheckpointTensor", "EngineRule", "EngineSize", "StoredBlock", "TransferError"]
__all__ += ["TransferLayout", "TransferPlan", "engine_layout", "engine_rules", "mesh_layout", "plan_cover"]
__all__ += ["plan_transfer"]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'tp_plans.transfer' has no attribute {name!r}: boxes are in tp_plans.boxes")
