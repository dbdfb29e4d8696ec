"""The same models under transformers' own tensor parallelism, for comparison."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class NoPlanError(Exception):
    """transformers ships no plan for the model."""


def parallelize_by_transformers(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """What ``from_pretrained(distributed_config=...)`` does to a model, on one that holds its weights already."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    hugging_face: Any = model
    if not getattr(model, "tp_plan", None):
        raise NoPlanError("transformers ships no plan for this model")
    for alias in hugging_face.all_tied_weights_keys:  # loading ties after it has split
        module, _, name = alias.rpartition(".")
        owner = model.get_submodule(module)
        setattr(owner, name, nn.Parameter(getattr(owner, name).detach().clone()))
    apply_tensor_parallelism(hugging_face, mesh["tp"], hugging_face._expand_parallel_plan(hugging_face.tp_plan))
    hugging_face.tie_weights()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(_in_own_layout)
    return model


def _in_own_layout(parameter: DTensor) -> None:
    """Optimizers take a gradient in any layout, so that one in another than its parameter's is no fault."""
    gradient: Any = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
