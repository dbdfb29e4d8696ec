"""Optimizers for models that are sharded over a mesh: their steps do not depend on the mesh.

Update: ``Muon``
Memory: ``CPUOffloadAdamW``, and ``LowBitAdamW`` with states in 8 bits or bfloat16
Groups: ``param_groups``, ``parameter_roles``
"""

from __future__ import annotations

from fsdp_runtime.optim.cpu_offload import CPUOffloadAdamW
from fsdp_runtime.optim.groups import param_groups
from fsdp_runtime.optim.low_bit import LowBitAdamW
from fsdp_runtime.optim.muon import Muon
from fsdp_runtime.optim.roles import parameter_roles

__all__ = ["CPUOffloadAdamW", "LowBitAdamW", "Muon", "param_groups", "parameter_roles"]
