"""TRL's experimental GKD trainer on a mesh: the divergence of logits as they are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.memory.unshard import unsharded
from fsdp_runtime.steps.outputs.generation import full_logits
from fsdp_runtime.trainers.rl_logprobs_backend import rl_logprobs
from fsdp_runtime.trainers.trl_trainers import TrlMixin, refuse_cp


class GKDMixin(TrlMixin):
    """Let TRL's GKD trainer train on a mesh; see :class:`TrlMixin`.

    Student and teacher keep their logits sharded on the vocabulary, and the ranks of one ``tp`` group sample the same
    tokens.  The teacher may be a path too, of which every rank reads its own shards.
    """

    def __init__(self, model: Any = None, *, mesh: DeviceMesh, args: Any = None, **kwargs: Any) -> None:
        refuse_cp(mesh)
        if getattr(args, "teacher_model_init_kwargs", None):
            raise OptionError("teacher_model_init_kwargs: pass teacher_model as a model, sharded or not")
        super().__init__(model, mesh=mesh, args=args, **kwargs)

    def _shard_models(self, model: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        model, kwargs = super()._shard_models(model, kwargs)
        if isinstance(teacher := kwargs.get("teacher_model"), str):
            kwargs = {**kwargs, "teacher_model": self._source.load(teacher, dtype="auto")}
        return model, kwargs

    def generate_on_policy_outputs(self, model: Any, inputs: Any, generation_config: Any) -> tuple[Tensor, ...]:
        """Sample from student or teacher with FSDP2's parameters gathered, the same tokens on all ranks of ``tp``."""
        self.accelerator.share_random_state()
        with torch.no_grad(), unsharded(model), full_logits(base_model(model)):
            found = super().generate_on_policy_outputs(model, inputs, generation_config)
        return tuple(self._from_first(list(found)))

    def generalized_jsd_loss(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor,
        labels: Tensor,
        beta: float = 0.5,
        temperature: float = 1.0,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return what TRL's does, from logits ``[batch, tokens, vocab]`` that may be sharded on the vocabulary."""
        valid = labels != -100
        total: Tensor = rl_logprobs().token_divergence(
            student_logits, teacher_logits, beta=beta, temperature=temperature, mask=valid
        )
        return total.sum() / (valid.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
