"""TRL's distillation trainers on a mesh: their losses read heads or logits that are sharded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.mesh import axis_size
from fsdp_runtime.steps.context.step import whole_rows
from fsdp_runtime.trainers._trl_compat import DIVERGENCE, replaced
from fsdp_runtime.trainers.full_rows import FullRows, part_of_rows
from fsdp_runtime.trainers.rl_logprobs_backend import rl_logprobs
from fsdp_runtime.trainers.trl_trainers import GeneratingMixin, TrlMixin
from tp_plans.runtime import plain_full_tensor


class DistillationMixin(GeneratingMixin):
    """Let TRL's distillation trainer train on a mesh, with the divergence of the full vocabulary as it is sharded."""

    _forward_redirection: Any
    _rows: FullRows | None = None

    def __init__(self, model: Any = None, *, mesh: DeviceMesh, args: Any = None, **kwargs: Any) -> None:
        super().__init__(model, mesh=mesh, args=args, **kwargs)
        if axis_size(mesh, "cp") > 1:
            self._forward_redirection = partial(_redirected, self._forward_redirection)

    def _get_last_hidden_state(
        self, unwrapped_model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **media: Any
    ) -> Tensor:
        """Return the hidden states ``[batch, completion, features]``; under ``cp`` of this rank's tokens only."""
        if axis_size(self.mesh, "cp") > 1:
            trunk = base_model(unwrapped_model).base_model
            given = {"input_ids": input_ids, "attention_mask": attention_mask, **media}
            with part_of_rows(unwrapped_model, **given) as (self._rows, own):
                hidden = trunk(**own).last_hidden_state
        else:
            hidden = super()._get_last_hidden_state(unwrapped_model, input_ids, attention_mask, logits_to_keep, **media)
        return plain_full_tensor(hidden, hidden.device_mesh) if isinstance(hidden, DTensor) else hidden

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with replaced(type(self), {DIVERGENCE: lambda *a, **options: divergence_loss(*a, rows=self._rows, **options)}):
            return super()._compute_loss(*args, **kwargs)


def _redirected(redirect: Any, wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a method within a model's forward; the method cuts the forward's inputs itself."""
    with whole_rows(wrapper):
        return redirect(wrapper, *args, **kwargs)


def divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Any = None,
    *,
    temperature: float = 1.0,
    rows: FullRows | None = None,
    **heads: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute TRL's ``_chunked_divergence_loss`` from heads that may be sharded on the vocabulary.

    Hidden states are ``[batch, tokens, features]``, the same on every rank of ``tp``, and weights ``[vocab,
    features]``. ``beta`` is 0 for forward KL, 1 for reverse KL, between them Jensen-Shannon.  ``heads`` are
    bias, scale and soft cap of both heads, by TRL's names.  With ``rows`` hidden states belong to this rank's tokens,
    prompts included.

    Returns the loss, the sum of the student's entropy without gradient, and the number of tokens that count.
    """
    student = _logits("student", student_hidden_states, student_lm_head_weight, heads)
    teacher = _logits("teacher", teacher_hidden_states, teacher_lm_head_weight, heads)
    valid = completion_mask != 0
    number = valid.sum()
    if rows is not None:  # the state before each token of a completion predicts it
        valid = rows.shard(pad(valid, (rows.length - 1 - valid.shape[1], 1)))
    divergence = rl_logprobs().token_divergence(student, teacher, beta=beta, temperature=temperature, mask=valid)
    with torch.no_grad():
        statistics = rl_logprobs().linear_token_statistics(
            student.hidden,
            student.weight,
            torch.where(valid, 0, -100),
            entropy=True,
            bias=student.bias,
            logit_scale=student.logit_scale,
            softcap=student.softcap,
            temperature=temperature,
        )
        entropy = statistics.entropy.masked_fill(~valid, 0)
    if rows is not None:
        divergence, entropy = rows.gather(divergence), rows.gather(entropy)
    total = number.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return divergence.sum() / total, entropy.sum(), number


def _logits(model: str, hidden: Tensor, weight: Tensor, heads: Mapping[str, Any]) -> Any:
    weight, bias = (_over_tp(model, part) for part in (weight, heads.get(f"{model}_lm_head_bias")))
    return rl_logprobs().LinearLogits(
        hidden,
        weight if weight.dtype == hidden.dtype else weight.to(hidden.dtype),
        bias,
        heads.get(f"{model}_logit_scale", 1.0),
        heads.get(f"{model}_final_logit_softcapping"),
    )


def _over_tp(model: str, weight: Any) -> Any:
    """Gather a weight that FSDP2 has sharded, as a teacher's after its forward; return other weights unchanged."""
    if not isinstance(weight, DTensor):
        return weight
    names = weight.device_mesh.mesh_dim_names or ()
    axes = [name for name, own in zip(names, weight.placements, strict=True) if not own.is_replicate()]
    if axes in ([], ["tp"]):
        return weight
    if model == "student" and weight.requires_grad:
        raise ModelError(
            f"the student's head is sharded over {', '.join(axes)} within its forward: let FSDP2 gather it with the "
            "model around it, not as a separate module"
        )
    return weight.detach().full_tensor()  # type: ignore[attr-defined]


class GKDMixin(TrlMixin):
    """Let TRL's GKD trainer train on a mesh; see :class:`TrlMixin`.

    Student and teacher keep their logits sharded on the vocabulary, and the ranks of one ``tp`` group sample the same
    tokens.  The teacher may be a path too: every rank reads its own shards from the path.
    """

    def __init__(self, model: Any = None, *, mesh: DeviceMesh, args: Any = None, **kwargs: Any) -> None:
        if getattr(args, "teacher_model_init_kwargs", None):
            raise OptionError("teacher_model_init_kwargs: pass teacher_model as a model, sharded or not")
        super().__init__(model, mesh=mesh, args=args, **kwargs)

    def _shard_models(self, model: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        model, kwargs = super()._shard_models(model, kwargs)
        if isinstance(teacher := kwargs.get("teacher_model"), str):
            teacher = self._source.load(teacher, dtype="auto")
            self._adopt(teacher)
            kwargs = {**kwargs, "teacher_model": teacher}
        return model, kwargs

    def generate_on_policy_outputs(self, model: Any, inputs: Any, generation_config: Any) -> tuple[Tensor, ...]:
        """Sample from student or teacher, the same tokens on all ranks of ``tp``."""
        with self._sampling(model):
            outputs = super().generate_on_policy_outputs(model, inputs, generation_config)
        return self._from_first(outputs)

    def generalized_jsd_loss(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor,
        labels: Tensor,
        beta: float = 0.5,
        temperature: float = 1.0,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Compute TRL's loss from logits ``[batch, tokens, vocab]`` that may be sharded on the vocabulary."""
        valid = labels != -100
        divergence: Tensor = rl_logprobs().token_divergence(
            student_logits, teacher_logits, beta=beta, temperature=temperature, mask=valid
        )
        total = divergence.sum()
        if num_items_in_batch is None:
            return total / valid.sum().clamp(min=1)
        # TRL divides by the labels of all ranks, and a mean over ranks takes the place of their sum.
        ranks: int = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return total * ranks / num_items_in_batch
