"""The check of argument types that every public function begins with."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.errors import MeshError, ModelError, OptionError
from tp_plans.argument_types import argument_types


def _no_mesh(message: str) -> MeshError:
    return MeshError(f"{message}: build one with MeshSpec(...).build()")


def _no_dtype(message: str) -> OptionError:
    return OptionError(f"{message}: give a floating-point dtype, such as torch.bfloat16")


#: Refuses arguments of other types than the annotated ones, before the body of a function runs.
checked = argument_types(OptionError, {nn.Module: ModelError, DeviceMesh: _no_mesh, torch.dtype: _no_dtype})
