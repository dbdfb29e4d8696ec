"""The check of argument types that every public function begins with."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.errors import MeshError, ModelError, OptionError
from tp_plans.argument_types import argument_types


def _no_mesh(message: str) -> MeshError:
    return MeshError(f"{message}: build one with MeshSpec(...).build()")


#: Refuses arguments of other types than the annotated ones, before the body of a function runs.
checked = argument_types(OptionError, {nn.Module: ModelError, DeviceMesh: _no_mesh})
