"""Parallelizations with one planted error each, which the harness must catch and name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from fsdp_runtime import parallelize
from tp_plans import NoParallel, plan_for


def unreduced_query_norm(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank keeps the gradient of its own heads, as with plans that call a q norm simply replicated.

    ``parallelize`` refuses such a plan, so torch applies it, unchecked.
    """
    plan = plan_for(model).override({"model.layers.*.self_attn.q_norm": NoParallel(gradient="full")})
    return parallelize_module(model, mesh["tp"], plan.to_torch())


def bias_added_twice(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A row-wise layer's output gets its bias once more, as when every rank adds its own before the sum."""
    model = parallelize(model, mesh)
    for name, module in model.named_modules():
        if name.endswith("o_proj"):
            module.register_forward_hook(_add_bias_again)
    return model


def broken_tie(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The head gets a parameter of its own with the embedding's values, as ``parallelize_module`` leaves it."""
    model = parallelize(model, mesh)
    head: Any = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    return model


def wrong_on_rank_one(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The gradient of the final norm is one percent too large on rank 1, and right on rank 0."""
    model = parallelize(model, mesh)
    if dist.get_rank() == 1:
        model.get_parameter("model.norm.weight").register_hook(lambda gradient: gradient * 1.01)
    return model


def _add_bias_again(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + module.bias.to_local()
