"""Meshes of ranks: axes, and the rank of a process from its environment.

Meshes: ``MeshSpec``, ``adopt_mesh``
Parts:  ``submesh``, ``fsdp_mesh`` (the axes that FSDP2 shards over)
Launch: ``rank_info_from_env``, which returns a ``RankInfo``
"""

from __future__ import annotations

from fsdp_runtime.mesh.rendezvous import RankInfo, rank_info_from_env
from fsdp_runtime.mesh.spec import FLATTENED as FLATTENED
from fsdp_runtime.mesh.spec import MeshSpec, adopt_mesh, fsdp_mesh, submesh
from fsdp_runtime.mesh.spec import axis_size as axis_size
from fsdp_runtime.mesh.spec import require_axes as require_axes

__all__ = ["MeshSpec", "RankInfo", "adopt_mesh", "fsdp_mesh", "rank_info_from_env", "submesh"]
