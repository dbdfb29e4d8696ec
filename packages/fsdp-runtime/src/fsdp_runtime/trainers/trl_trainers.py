"""TRL's trainers on a mesh.

Written for TRL 1.16, whose trainers take log-probabilities from a patched ``model.forward`` (see ``fused_head``).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import transformers
import trl
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._peft_compat import base_model, is_peft_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.memory.unshard import unsharded
from fsdp_runtime.mesh.spec import axis_size, submesh
from fsdp_runtime.steps.outputs.generation import full_logits
from fsdp_runtime.trainers.fused_head import add_fused_lm_head
from fsdp_runtime.trainers.mesh_accelerator import replaced_globals
from fsdp_runtime.trainers.mesh_trainer import MeshTrainerMixin, data_parallel_rank
from fsdp_runtime.trainers.training_arguments import check_model


class SFTTrainer(MeshTrainerMixin, trl.SFTTrainer):
    """``trl.SFTTrainer`` for a model that ``parallelize`` has sharded.

    It takes the same arguments, by keyword, and ``mesh``; see :class:`MeshTrainerMixin` for what differs.
    Log-probabilities, entropy and token accuracy come from the sharded logits.
    """

    def __init__(self, model: nn.Module | None = None, *, mesh: DeviceMesh, args: Any = None, **kwargs: Any) -> None:
        with replaced_globals(trl.SFTTrainer.__init__, add_fused_lm_head=add_fused_lm_head):
            super().__init__(model, mesh=mesh, args=args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss; in evaluation too, divide it by the labels of all ranks, as the trainer of one process."""
        if num_items_in_batch is None and not self.model.training and self.args.average_tokens_across_devices:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class GRPOTrainer(MeshTrainerMixin, trl.GRPOTrainer):
    """``trl.GRPOTrainer`` for a model that ``parallelize`` has sharded.

    It takes the same arguments, by keyword, ``mesh`` and ``ref_model``; see :class:`MeshTrainerMixin` for what differs.
    Prompts are divided over ``dp``.  The ranks of one ``tp`` group generate the same completions together, with FSDP2's
    parameters gathered meanwhile, and use the same rewards: those of the group's first rank.

    Args:
        model: see :class:`MeshTrainerMixin`.
        mesh: see :class:`MeshTrainerMixin`.
        args: a ``trl.GRPOConfig``; its ``generation_batch_size`` is set to ``per_device_train_batch_size *
            steps_per_generation`` times the size of ``dp``.
        ref_model: with ``beta != 0``, the reference model, parallelized on the same mesh.
        kwargs: the trainer's other arguments, ``reward_funcs`` among them.
    """

    rollout_func: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        mesh: DeviceMesh,
        args: Any = None,
        ref_model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            raise OptionError("pass args=trl.GRPOConfig(...)")
        _check(args, kwargs, tp=axis_size(mesh, "tp"))
        if args.beta != 0.0:
            if is_peft_model(model):  # type: ignore[arg-type]
                raise OptionError(
                    f"beta={args.beta} with a PeftModel: TRL would add a reference adapter to a model that is sharded "
                    "already: set beta=0, or train without adapters and pass ref_model=..."
                )
            if ref_model is None:
                raise OptionError(
                    f"beta={args.beta} needs the reference model: pass ref_model=..., parallelized on the same mesh"
                )
            check_model(ref_model, mesh, recompute=False)
        replacements = {"add_fused_lm_head": add_fused_lm_head, "create_model_from_path": lambda *_, **__: ref_model}
        with replaced_globals(trl.GRPOTrainer.__init__, **replacements):
            super().__init__(model, mesh=mesh, args=_generation_over_dp(args, mesh), **kwargs)
        rollout = self.rollout_func
        if rollout is not None:
            self.rollout_func = lambda prompts, trainer: self._from_first([rollout(prompts, trainer)])[0]
        # TRL seeds every process of the world differently; the ranks of tp must draw the same numbers.
        transformers.set_seed(self.args.seed + data_parallel_rank(mesh))

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with FSDP2's parameters gathered and plain logits, the same tokens on all ranks of ``tp``."""
        self.accelerator.share_random_state()
        model = self.model
        with torch.no_grad(), unsharded(model), full_logits(base_model(model)):
            completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        return self._from_first([completion_ids, logprobs])

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        gathering = {"gather": self.accelerator.gather_from_first, "gather_object": self.accelerator.gather_objects}
        with replaced_globals(trl.GRPOTrainer.__init__, **gathering):
            return super()._generate_and_score_completions(inputs)

    def _from_first(self, values: list[Any]) -> list[Any]:
        """What the first rank of the ``tp`` group holds."""
        if (group := self.accelerator.model_group) is not None:
            dist.broadcast_object_list(values, group=group, group_src=0)
        return values


def _check(args: Any, kwargs: dict[str, Any], *, tp: int) -> None:
    """Raise :class:`OptionError` for what GRPO cannot do on a mesh."""
    refused = {
        "use_vllm": "it reads parameters that are sharded: generate in an engine of your own (rollout_func) and send "
        "it the weights with fsdp_runtime.sync.send_weights",
        "use_transformers_continuous_batching": "it is not covered: leave it off",
        "sync_ref_model": "it is not covered: leave it off",
        "cast_lm_head_to_fp32": "it replaces the sharded head: leave it off, or load float32 weights",
    }
    for name, instead in refused.items():
        if getattr(args, name, False):
            raise OptionError(f"{name}=True cannot be used on a model that parallelize has sharded: {instead}")
    for name in ("tools", "environment_factory"):
        if tp > 1 and kwargs.get(name):
            raise OptionError(f"{name} would act once on every rank of tp={tp}: use a mesh with tp=1")


def _generation_over_dp(args: Any, mesh: DeviceMesh) -> Any:
    """The arguments with the generation batch counted over ``dp`` instead of the world."""
    args = copy.copy(args)
    dp = submesh(mesh, "dp").size()
    args.generation_batch_size = args.per_device_train_batch_size * args.steps_per_generation * dp
    if args.generation_batch_size % args.num_generations:
        raise OptionError(
            f"per_device_train_batch_size={args.per_device_train_batch_size} times steps_per_generation="
            f"{args.steps_per_generation} on dp={dp} gives {args.generation_batch_size} completions at a time, which "
            f"num_generations={args.num_generations} does not divide"
        )
    return args
