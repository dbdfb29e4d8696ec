"""Optimizers on any mesh, and parameter groups by role.

Optimizers: ``Muon``
Groups:     ``param_groups``, ``parameter_roles``
"""

from __future__ import annotations

from fsdp_runtime.optim.groups import param_groups
from fsdp_runtime.optim.muon import Muon
from fsdp_runtime.optim.roles import parameter_roles

__all__ = ["Muon", "param_groups", "parameter_roles"]
