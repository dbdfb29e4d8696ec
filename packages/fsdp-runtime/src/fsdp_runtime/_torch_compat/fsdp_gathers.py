"""FSDP2's all-gather of a parameter in another format than its shard's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime._torch_compat.fsdp2 import fsdp_parameters
from fsdp_runtime._torch_compat.meshes import local_tensor


def set_gathers(model: nn.Module, gathers: Mapping[nn.Module, Any]) -> None:
    """Let FSDP2 gather the weights of some modules by ``before`` and ``after`` of their gathers."""
    # FSDP2 looks for the two functions on the local tensor, and documents them for subclasses; an attribute leaves
    # optimizers and saves a plain tensor.  A parameter that was gathered before keeps its buffers, and its format
    # (private in torch 2.11 to 2.15).
    for parameter in fsdp_parameters(model):
        gather, local = gathers.get(parameter._module_info.module), local_tensor(parameter.sharded_param)
        is_weight = parameter._module_info.param_name == "weight"
        is_late = hasattr(parameter, "_unsharded_param") and not hasattr(parameter, "_extensions_data")
        if gather is not None and is_weight and not is_late and not hasattr(local, "fsdp_pre_all_gather"):
            local.fsdp_pre_all_gather, local.fsdp_post_all_gather = gather.before, gather.after  # type: ignore[attr-defined]
            parameter._init_extensions()


def write_gathered(parameter: Tensor, values: Tensor) -> None:
    """Write the values of a gathered parameter; autograd takes them for the values of the forward."""
    # ``_unsafe_preserve_version_counter`` is private in torch 2.11 to 2.15, and FSDP2 writes under it likewise.
    local = local_tensor(parameter)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(local):  # type: ignore[attr-defined]
        local.copy_(values)
