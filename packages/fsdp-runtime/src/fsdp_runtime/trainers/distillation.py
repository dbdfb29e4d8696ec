"""TRL's distillation trainer on a mesh: its loss reads the weights of two heads, which are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fsdp_runtime.trainers._trl_compat import DIVERGENCE, global_of, replaced
from fsdp_runtime.trainers.trl_trainers import GeneratingMixin
from tp_plans.runtime import plain_full_tensor

_WEIGHTS = tuple(f"{model}_lm_head_{part}" for model in ("student", "teacher") for part in ("weight", "bias"))


class DistillationMixin(GeneratingMixin):
    """Let TRL's distillation trainer train on a mesh; see :class:`GeneratingMixin`.

    Every rank of ``tp`` computes the divergence of the full vocabulary, from gathered heads; each keeps its own rows of
    the gradient.
    """

    def _get_last_hidden_state(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden = super()._get_last_hidden_state(*args, **kwargs)
        full: Tensor = plain_full_tensor(hidden, hidden.device_mesh) if isinstance(hidden, DTensor) else hidden
        return full

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        divergence = global_of(type(self), DIVERGENCE)

        def of_full_weights(student: Tensor, teacher: Tensor, *heads: Any, **options: Any) -> Any:
            weights = (full_weight(head) for head in heads[:2])
            options = {name: full_weight(value) if name in _WEIGHTS else value for name, value in options.items()}
            return divergence(student, teacher, *weights, *heads[2:], **options)

        with replaced(type(self), {DIVERGENCE: of_full_weights}):
            return super()._compute_loss(*args, **kwargs)


def full_weight(weight: Any) -> Any:
    """Gather a weight that is sharded over ``tp``; other values as they are."""
    return _FullWeight.apply(weight) if isinstance(weight, DTensor) else weight  # type: ignore[no-untyped-call]


class _FullWeight(torch.autograd.Function):
    """All ranks compute the same of the full weight, so that each takes its own rows of the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = weight.device_mesh, weight.placements
        return weight.full_tensor()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> DTensor:
        full = DTensor.from_local(gradients[0].contiguous(), ctx.mesh, [Replicate()] * ctx.mesh.ndim, run_check=False)
        return full.redistribute(placements=ctx.placements)
