"""The same models under transformers' own tensor and expert parallelism, for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from coverage.cells import NO_PLAN


class NoPlanError(Exception):
    """transformers ships no plan for the model."""


def parallelize_by_transformers(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """What ``from_pretrained(distributed_config=...)`` does to a model, on one that holds its weights already."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    hugging_face: Any = model
    if not getattr(model, "tp_plan", None):
        raise NoPlanError(NO_PLAN)
    _untie(hugging_face)
    apply_tensor_parallelism(hugging_face, mesh["tp"], hugging_face._expand_parallel_plan(hugging_face.tp_plan))
    hugging_face.tie_weights()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(_in_own_layout)
    return model


def experts_by_transformers(model: nn.Module, axes: Mapping[str, int]) -> nn.Module:
    """Apply expert parallelism and FSDP2 as ``from_pretrained(distributed_config=...)`` does, to a model with weights.

    Args:
        model: the model, with its weights.
        axes: sizes of ``dp_shard``, ``tp`` and ``ep``.

    Raises:
        NoPlanError: transformers refuses these sizes, or ships no plan for the model.
    """
    hugging_face: Any = model
    try:
        config, mesh = _distributed(axes["dp_shard"], axes.get("tp", 1), axes["ep"])
        hugging_face._resolve_parallel_plans(config)
    except ValueError as error:
        raise NoPlanError(str(error)) from error
    _untie(hugging_face)
    type(hugging_face).maybe_distribute_model(hugging_face, config, mesh)
    hugging_face.tie_weights()
    return model


@cache
def _distributed(fsdp: int, tp: int, ep: int) -> tuple[Any, Any]:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    config = DistributedConfig(fsdp_size=fsdp, tp_size=tp, ep_size=ep)
    return config, initialize_distributed_mesh(config)[1]


def _untie(model: Any) -> None:
    """Give tied weights parameters of their own: loading ties them after it has split the model."""
    for alias in model.all_tied_weights_keys:
        module, _, name = alias.rpartition(".")
        owner = model.get_submodule(module)
        setattr(owner, name, nn.Parameter(getattr(owner, name).detach().clone()))


def _in_own_layout(parameter: DTensor) -> None:
    """Optimizers take a gradient in any layout, so that one in another than its parameter's is no fault."""
    gradient: Any = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
