"""Parallelizations with one deliberate error each, which the harness must detect and name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import parallelize_module

from fsdp_runtime import parallelize, resolve_parallelism
from fsdp_runtime.steps import ExpertParallel
from tp_plans import NoParallel, plan_for
from tp_plans.runtime import scale_expert_gradients
from tp_plans.torch_styles import AllToAllExchange, DispatchedTokens


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
            module.register_forward_hook(add_bias_again)
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


def add_bias_again(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + module.bias.to_local()


class DetachedWeights(AllToAllExchange):
    def dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor, *, experts: int) -> DispatchedTokens:
        return super().dispatch(hidden, index, weights.detach(), experts=experts)


class LosesAToken(AllToAllExchange):
    def dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor, *, experts: int) -> DispatchedTokens:
        if dist.get_rank() == 0:
            index = index.clone()
            index[0] = -1
        return super().dispatch(hidden, index, weights, experts=experts)


def detached_router(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Routing weights come to the experts without a gradient."""
    return parallelize(model, mesh, steps=(ExpertParallel(DetachedWeights),))


def dropped_token(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The first token of rank 0 is sent to no expert."""
    return parallelize(model, mesh, steps=(ExpertParallel(LosesAToken),))


def token_counted_twice(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Ranks of ``tp`` do not divide the tokens that they share, and each sends all."""
    resolved = resolve_parallelism(model, mesh)
    meshes = replace(resolved.setup.meshes, shared=None)
    replace(resolved, setup=replace(resolved.setup, meshes=meshes)).apply(model)
    return model


def undivided_experts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The gradients of experts are the mean over ``efsdp``, without the division by the data-parallel ranks."""
    model = parallelize(model, mesh)
    for path, module in model.named_modules():
        if path.endswith(".experts") and isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda gradient: None)
        elif path.endswith(".experts"):
            scale_expert_gradients(module, 1)
    return model


def expert_without_gradient(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """One stack of experts has no gradient after backward on rank 1."""
    model = parallelize(model, mesh)
    if dist.get_rank() == 1:
        parameter = model.get_parameter("model.layers.1.mlp.experts.down_proj")
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    return model
