"""Optimizer steps and evaluations of a trainer in pipeline stages.

One schedule runs the micro-batches of an optimizer step.  The last stage calls the trainer's code for the loss; the
other stages call the model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.errors import OptionError
from fsdp_runtime.keywords import Options
from fsdp_runtime.mesh import axis_size
from fsdp_runtime.model.stages import stages_of
from fsdp_runtime.steps import Pipeline
from fsdp_runtime.steps.pipeline.parts import media_of
from fsdp_runtime.steps.pipeline.schedule import run_stages
from fsdp_runtime.trainers.logits import full


def prepare_stages(mesh: DeviceMesh, args: Any, options: Options, model: Any) -> None:
    """Check that micro-batches of a schedule are the trainer's; a missing ``Pipeline`` is added to the options."""
    if axis_size(mesh, "pp") == 1:
        return
    count = getattr(args, "gradient_accumulation_steps", 1)
    steps: list[Any] = [*(options.get("steps") or ())]
    given = [step for step in steps if isinstance(step, Pipeline)]
    if model is not None:
        given = [stages.schedules] if (stages := stages_of(model)) is not None else []
    elif not given:
        options["steps"] = (*steps, Pipeline(microbatches=count))
    for step in given:
        if step.microbatches != count:
            raise OptionError(
                f"gradient_accumulation_steps={count} and Pipeline(microbatches={step.microbatches}): one schedule "
                "runs the micro-batches of an optimizer step; give both the same number"
            )
    if getattr(args, "activation_offloading", False):
        raise OptionError(
            f"activation_offloading follows one backward after each forward, and pp={axis_size(mesh, 'pp')} "
            "interleaves them: recompute with parallelize(..., activation_checkpointing='block')"
        )


class StagedTraining:
    """The schedules of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._batches: list[Any] = []
        self._losses: list[Tensor] = []

    def begin(self, batches: Sequence[Any]) -> None:
        """Take the micro-batches of an optimizer step."""
        self._batches, self._losses = [*batches], []

    def train(self, training_step: Callable[[Any], Any]) -> Tensor:
        """Return the loss of the next micro-batch; the first call of an optimizer step runs all of them."""
        if not self._losses:
            batches = self._prepared(self._batches)

            def last(index: int) -> Tensor:
                training_step(without_media(batches[index]))
                if len(losses) != 1:
                    raise OptionError(
                        f"training_step of {type(self._trainer).__name__} called accelerator.backward {len(losses)} "
                        "times for a micro-batch, and a schedule of stages takes one loss: call it once"
                    )
                return losses.pop()

            self._trainer.model.train()
            with self._trainer.accelerator.scheduled_losses() as losses:
                self._losses = [*self._run(batches, last, backward=True)]
        return self._losses.pop(0)

    def predict(self, inputs: Any, prediction_step: Callable[[Any], Any]) -> Any:
        """Return the values of ``prediction_step`` for one batch, on all stages."""
        batches, results = self._prepared([inputs]), []

        def last(index: int) -> Tensor:
            results.append(send_to_device(full(prediction_step(without_media(batches[index]))), "cpu"))
            return torch.zeros((), device=self._trainer.args.device)

        self._run(batches, last, backward=False)
        return send_to_device(self.of_last_stage(results)[0], self._trainer.args.device)

    def of_last_stage(self, value: Any) -> Any:
        """Return the last stage's value on all stages."""
        stages, values = stages_of(self._trainer.model), [value]
        dist.broadcast_object_list(values, group=stages.mesh.get_group(), group_src=stages.ranks[-1])
        return values[0]

    def _prepared(self, batches: Sequence[Any]) -> list[dict[str, Any]]:
        device = self._trainer.args.device
        return [{**send_to_device(batch, device), "use_cache": False} for batch in batches]

    def _run(self, batches: Sequence[dict[str, Any]], last: Callable[[int], Tensor], *, backward: bool) -> Tensor:
        of_loss = {*(self._trainer.label_names or ()), "labels", "shift_labels"}
        inputs = [{name: value for name, value in batch.items() if name not in of_loss} for batch in batches]
        return run_stages(self._trainer.model, inputs, last, backward=backward)


def without_media(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of the last stage; the first stage alone has the towers."""
    media = media_of(batch)
    return {name: value for name, value in batch.items() if name not in media}
