"""The part that all trainers on a mesh share: data, gradients, saving and resuming."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime import load_training_state, load_weights, save_training_state, submesh
from fsdp_runtime._peft_compat import base_model, is_peft_model
from fsdp_runtime.errors import CheckpointError, ModelError, OptionError
from fsdp_runtime.keywords import Options
from fsdp_runtime.mesh import axis_size, require_axes
from fsdp_runtime.sharded import first_rank_speaks
from fsdp_runtime.steps.outputs.full_tensors import gather_logits
from fsdp_runtime.trainers import logits as losses
from fsdp_runtime.trainers import training_arguments as arguments
from fsdp_runtime.trainers.accelerator_state import STATE_FOLDER
from fsdp_runtime.trainers.mesh_accelerator import MeshAccelerator, over_mesh
from fsdp_runtime.trainers.model_source import ModelSource, is_sharded
from fsdp_runtime.trainers.rl_logprobs_backend import rl_logprobs
from fsdp_runtime.trainers.stages import StagedTraining, prepare_stages
from fsdp_runtime.trainers.step_values import LogStepValues

logger = logging.getLogger(__name__)


class MeshTrainerMixin(LogStepValues):
    """Let a trainer derived from ``transformers.Trainer`` train a model that ``parallelize`` has sharded.

    Put it before the trainer's class: ``class MyTrainer(MeshTrainerMixin, TheirTrainer)``.  Batches are divided over
    ``dp``; ranks that differ only in ``tp`` or ``cp`` get the same batches.  ``save_model`` writes files for
    ``from_pretrained``; checkpoints resume on this mesh or another.  Logged steps come with the values of a
    ``StepMeter``, but in pipeline stages.  There one schedule runs the micro-batches of an optimizer step;
    transformers' trainer and TRL's SFT trainer take such meshes.

    Args:
        model: a model after ``parallelize`` and ``load_weights``; or an unsharded model with its weights,
            which the trainer then parallelizes.
        mesh: the mesh of the model, also of a model to be parallelized.
        args: the trainer's training arguments.
        parallelize_kwargs: keywords of ``parallelize`` for the models that the trainer shards itself: its model,
            models of ``model_init``, references and teachers.
        kwargs: the trainer's other arguments, by keyword.

    Raises:
        BackendError: rl-logprobs is not installed.
        MeshError: the mesh has other axes.
        ModelError: the model is parallelized on another mesh, has no weights yet, or fewer tokens than the tokenizer.
        OptionError: an option that would be wrong on a sharded model, or fewer samples than ranks of ``dp``.
    """

    accelerator: MeshAccelerator
    label_smoother: Any
    mesh: DeviceMesh
    _takes_dispatched_batches = False
    _stages: StagedTraining | None = None

    @first_rank_speaks()
    def __init__(
        self,
        model: Any = None,
        *,
        mesh: DeviceMesh,
        args: Any = None,
        parallelize_kwargs: Options | None = None,
        **kwargs: Any,
    ) -> None:
        require_axes(mesh, stages=self._takes_stages())
        options: Options = {**(parallelize_kwargs or {})}
        sharded = isinstance(model, nn.Module) and is_sharded(model)
        if sharded and parallelize_kwargs:
            raise OptionError("parallelize_kwargs for a model that is sharded already: pass it before parallelize")
        if args is not None:
            args = arguments.adapted(args, options, sharded=sharded)
            arguments.check_arguments(args, dispatched=self._takes_dispatched_batches)
            if kwargs.get("optimizers", (None, None))[0] is None and kwargs.get("optimizer_cls_and_kwargs") is None:
                arguments.check_optimizer(args)
        rl_logprobs()  # raises where it is missing
        prepare_stages(mesh, args, options, model if sharded else None)
        self.mesh = mesh
        self._stages = StagedTraining(self) if axis_size(mesh, "pp") > 1 else None
        self._reads_logits = getattr(args, "label_smoothing_factor", 0) > 0
        self._evaluated: set[int] = set()
        self._source = ModelSource(mesh, options, seed=getattr(args, "seed", 0))
        if isinstance(model, nn.Module):
            arguments.check_model(model, self.mesh, args)
        if callable(own := kwargs.get("compute_loss_func")):
            kwargs = {**kwargs, "compute_loss_func": losses.loss_of_sharded_logits(own)}
        model, kwargs = self._shard_models(model, kwargs)
        super().__init__(model=model, args=args, **kwargs)
        self._adopt(self.model)
        self._check_data()
        losses.check_heads(self)
        if self.label_smoother is not None:
            self.label_smoother = losses.label_smoother_for(self.label_smoother, base_model(self.model))

    @classmethod
    def _takes_stages(cls) -> bool:
        """Return True if the trainer calls the model for the loss of a micro-batch alone."""
        return True

    def _shard_models(self, model: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the model and the other arguments, with sharded models in place of plain ones."""
        if model is None and kwargs.get("model_init") is not None:
            return None, kwargs
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"model={model!r}: build it and pass it on, sharded or not; this trainer does not load it by name"
            )
        return self._source.shard(model), kwargs

    def _check_data(self) -> None:
        arguments.check_tokens(base_model(self.model), self.processing_class)
        batch, drop_last = self._train_batch_size, self.args.dataloader_drop_last
        arguments.check_samples(self.train_dataset, batch, self.mesh, drop_last=drop_last)
        held_out = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"evaluation": self.eval_dataset}
        for name, dataset in held_out.items():
            self._check_evaluated(name, dataset)

    @first_rank_speaks()
    def _check_evaluated(self, name: str, dataset: Any) -> None:
        """Warn, once per size, if the last batch of an evaluation is filled up."""
        size = arguments.size_of(dataset)
        if size not in self._evaluated:
            self._evaluated.add(size)
            batch, ranks = self.args.eval_batch_size, submesh(self.mesh, "dp").size()
            arguments.warn_of_repeated(name, dataset, batch, ranks, drop_last=self.args.dataloader_drop_last)

    def _shard_other(self, model: nn.Module, args: Any = None) -> nn.Module:
        """Shard a further model, or a model that is made later."""
        arguments.check_model(model, self.mesh, args)
        model = self._source.shard(model)
        self._adopt(model)
        return model

    def _adopt(self, model: nn.Module) -> None:
        losses.compute_losses_on(model, self.mesh)
        if self._reads_logits:
            gather_logits(base_model(model))

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a model by ``model_init``, and shard it."""
        return self._shard_other(super().call_model_init(trial), self.args)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, over the ranks of ``dp``."""
        super().create_accelerator_and_postprocess()
        self.accelerator = over_mesh(self.accelerator, self.mesh)
        if self.accelerator.dataloader_config.dispatch_batches is None:
            self.accelerator.dataloader_config.dispatch_batches = False
        self.gather_function = self.accelerator.gather_for_metrics

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of one optimizer step over all ranks of ``dp``."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return this rank's part of the operations of a forward and backward on ``inputs``."""
        ranks = self.mesh.size() // axis_size(self.mesh, "pp")  # a stage counts its own parameters
        return super().floating_point_ops(inputs) * self.accelerator.num_processes / ranks

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the micro-batches of an optimizer step, and the number of their labels."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        if self._stages is not None:
            self._stages.begin(batches)
        return batches, items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of a micro-batch; in pipeline stages, of all of the step at the first."""
        step = super().training_step
        if self._stages is None:
            return step(model, inputs, num_items_in_batch)
        return self._stages.train(lambda batch: step(model, batch, num_items_in_batch))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss; a mean over this rank's labels is weighted by their share of all ranks' labels."""
        ranks = self.accelerator.num_processes
        compute = partial(super().compute_loss, model, inputs, return_outputs, num_items_in_batch)
        if ranks == 1:
            return losses.with_loss_of_heads(compute, self, model, num_items_in_batch)
        with losses.CountOfLabels(base_model(model)) as count:
            loss = losses.with_loss_of_heads(compute, self, model, num_items_in_batch)
        weight: Tensor | float = 1
        if self.args.average_tokens_across_devices and isinstance(inputs.get("labels"), Tensor):
            if num_items_in_batch is None:  # classes that say ``accepts_loss_kwargs = False``: most with images
                if self._has_own_loss and not count.is_of_model(loss[0] if return_outputs else loss):
                    return loss  # a subclass's own loss is a rank's loss, as under DDP
                weight = self._share_of_labels(inputs) * ranks
            elif count.is_ignored:  # the trainer has multiplied a mean by the ranks
                weight = self._share_of_labels(inputs)
        return (loss[0] * weight, *loss[1:]) if return_outputs else loss * weight

    @property
    def _has_own_loss(self) -> bool:
        """True if a class of neither transformers nor TRL computes the loss."""
        others = (cls for cls in type(self).__mro__ if not issubclass(cls, MeshTrainerMixin))
        owner = next(cls for cls in others if "compute_loss" in vars(cls))
        return owner.__module__.partition(".")[0] not in ("transformers", "trl")

    def _share_of_labels(self, inputs: Mapping[str, Tensor]) -> Tensor:
        labels = inputs.get("shift_labels", inputs["labels"])
        shifts = self._loss_shifts_labels and "shift_labels" not in inputs
        own = (labels[..., 1:] if shifts else labels).ne(-100).sum()
        return own / self.accelerator.reduce(own).clamp(min=1)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, or predict, on a data set that may differ from the trainer's."""
        self._check_evaluated("evaluation", dataloader.dataset)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch; logits come back as plain tensors."""
        step = super().prediction_step
        if self._stages is None:
            return losses.full(step(model, inputs, *args, **kwargs))
        return self._stages.predict(inputs, lambda batch: step(model, batch, *args, **kwargs))

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return rl_logprobs().clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Any:
        return rl_logprobs().grad_norm(model.parameters()) if grad_norm is None else grad_norm

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the weights or adapters, the tokenizer and the arguments; collective."""
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if self.args.should_save and tokenizer is not None:  # first, so that the checkpoint's own is not copied
            tokenizer.save_pretrained(folder)
        self.accelerator.save_model(self.model, folder, max_shard_size="5GB")
        if self.args.should_save:
            torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_training_state(
            Path(output_dir, STATE_FOLDER),
            self.model,
            self.optimizer.optimizer,
            step=self.state.global_step,
            scheduler=self.lr_scheduler,
            keep=0,
        )

    @first_rank_speaks()
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if Path(checkpoint, STATE_FOLDER).is_dir():
            load_training_state(
                Path(checkpoint, STATE_FOLDER), self.model, self.optimizer.optimizer, scheduler=self.lr_scheduler
            )
        elif Path(checkpoint, "optimizer.pt").exists():
            raise CheckpointError(
                f"{checkpoint} has optimizer.pt, the state of an unsharded trainer: resume it there, or start "
                "from its weights with load_weights"
            )
        else:
            logger.warning("%s has weights only: the optimizer and the schedule restart", checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not Path(resume_from_checkpoint, STATE_FOLDER).is_dir():  # else loaded with the optimizer's state
            self._load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, folder: str) -> None:
        if is_peft_model(self.model):
            state = Path(folder, STATE_FOLDER)
            if not state.is_dir():
                raise CheckpointError(f"{folder} has no {STATE_FOLDER}: a model with adapters resumes from one only")
            load_training_state(state, self.model)
        else:
            load_weights(self.model, folder)
