"""Train and score a model in pipeline stages with the schedules of ``torch.distributed.pipelining``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._torch_compat import merged_parameter_groups
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.memory.gradient_accumulation import drop_placeholders
from fsdp_runtime.memory.unshard import unsharded
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.runtime_state import RUNTIME_STATE
from fsdp_runtime.steps.pipeline.parts import RECORDED, StagedModel, StageRun, Tokens, running, stage_inputs
from fsdp_runtime.steps.pipeline.shapes import device_of, rows_and_tokens, sent_shapes
from fsdp_runtime.steps.pipeline.state import summing_shared_gradients
from fsdp_runtime.steps.pipeline.trace import require_media_on_first_stage
from fsdp_runtime.steps.pipeline.values import Value

MicroBatch = Mapping[str, Any]
Loss = Callable[[Any, MicroBatch], Tensor]
#: The loss of a micro-batch from its index and the model's output.
End = Callable[[int, Any], Tensor]


def forward_backward(model: nn.Module, micro_batches: Sequence[MicroBatch], loss: Loss | None = None) -> Tensor:
    """Run the forward and backward of a batch over all stages; every rank of ``pp`` calls it with the same batch.

    Gradients are added to ``parameter.grad``, as by one ``loss.backward()`` of the sum of all losses.  Parameters on
    several ranks of ``pp``, such as a tied embedding, get the sum of their gradients.

    Args:
        model: from ``parallelize(model, mesh, steps=(Pipeline(...),))``.
        micro_batches: keywords of the model's forward, one dict per micro-batch, as many as the step's
            ``microbatches``.  Their lengths may differ.
        loss: a function of the model's output and the micro-batch, which returns a scalar; called on the last stage.
            Weigh it for a mean over all micro-batches, as with ``rl_logprobs.mean_weights``.  By default the loss that
            the model computes from ``labels``: the mean over the labels of this call.  Data-parallel ranks with other
            numbers of labels need ``mean_weights``.

    Returns:
        The loss of each micro-batch, ``[micro_batches]``, on every rank of ``pp``, detached.

    Raises:
        ModelError: the model is not in pipeline stages.
        OptionError: the number of micro-batches is not the step's, or a micro-batch has neither ``labels`` nor a loss.

    Example:
        >>> from fsdp_runtime.steps import forward_backward
        >>> def train(model, tokens):  # [rows, length]; on every rank of a mesh with pp
        ...     losses = forward_backward(model, [{"input_ids": rows, "labels": rows} for rows in tokens.chunk(4)])
        ...     return losses.sum()
    """
    staged = _staged(model, micro_batches)
    weights = [1.0] * len(micro_batches) if loss is not None else _label_weights(base_model(model), micro_batches)

    def weighted(index: int, output: Any) -> Tensor:
        batch = micro_batches[index]
        value = output.loss * weights[index] if loss is None else loss(output, batch)
        if not isinstance(value, Tensor) or value.ndim:
            raise OptionError(f"the loss of micro-batch {index} is {value!r}: return a tensor without dimensions")
        return value.full_tensor() if isinstance(value, DTensor) else value

    return _Schedule(model, staged, micro_batches, weighted).run(backward=True)


def forward_only(
    model: nn.Module, micro_batches: Sequence[MicroBatch], outputs: Callable[[Any, MicroBatch], Any] | None = None
) -> list[Any] | None:
    """Run the forward of a batch over all stages, without gradients; every rank of ``pp`` calls it with the same batch.

    Args:
        model: from ``parallelize(model, mesh, steps=(Pipeline(...),))``.
        micro_batches: keywords of the model's forward, one dict per micro-batch.
        outputs: a function of the model's output and the micro-batch, called on the last stage, such as one that
            returns log-probabilities; by default the output itself.

    Returns:
        The outputs of the micro-batches on the rank with the last stage, ``None`` on others.

    Raises:
        ModelError: the model is not in pipeline stages.
        OptionError: the number of micro-batches is not the step's.

    Example:
        >>> from fsdp_runtime.steps import forward_only
        >>> def score(model, tokens):  # [rows, length]; on every rank of a mesh with pp
        ...     batches = [{"input_ids": rows} for rows in tokens.chunk(4)]
        ...     return forward_only(model, batches, lambda output, batch: output.logits.argmax(-1))
    """
    staged = _staged(model, micro_batches)
    results: dict[int, Any] = {}

    def keep(index: int, output: Any) -> Tensor:
        results[index] = output if outputs is None else outputs(output, micro_batches[index])
        return torch.zeros((), device=device_of(model))

    _Schedule(model, staged, micro_batches, keep).run(backward=False)
    return [results[index] for index in range(len(micro_batches))] if results else None


def run_stages(
    model: nn.Module, micro_batches: Sequence[MicroBatch], last: Callable[[int], Tensor], *, backward: bool
) -> Tensor:
    """Run any number of micro-batches; on the last stage ``last`` calls the model with one, and returns its loss.

    A number that the step's schedule does not take runs by a plain schedule over the same stages.
    """
    staged = _staged(model, micro_batches, any_number=True)
    return _Schedule(model, staged, micro_batches, lambda index, _: last(index), calls=False).run(backward=backward)


class Stage(PipelineStage):
    """A stage that takes its micro-batch from the call; its FSDP modules reduce once, after the schedule."""

    # torch divides batches into equal parts of tensors; micro-batches here are dicts of any shapes.
    forward: Callable[..., Any]
    errors: list[Exception]  # of all stages of the rank
    micro_batch = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.micro_batch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.locating("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    @contextmanager
    def locating(self, direction: str, micro_batch: int) -> Iterator[None]:
        """Name the micro-batch and the stage in a note of an error, which torch replaces."""
        try:
            yield
        except Exception as error:
            error.add_note(f"in the {direction} of micro-batch {micro_batch} on stage {self.stage_index}")
            self.errors.append(error)
            raise

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.locating("forward", self.micro_batch):
            return self.forward(self.stage_index, self.micro_batch, args)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type == "weight":
            bwd_kwargs["param_groups"] = merged_parameter_groups(bwd_kwargs["param_groups"])
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the stages of a rank reduce together."""

    def reduce_gradients(self, model: nn.Module) -> None:
        drop_placeholders(model)
        self.submod = model
        super().perform_reduce_grad(1)


class ModelParameters(nn.Module):
    """Stands for the model in a stage: torch reads its parameters, and does not see FSDP modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["parameters"] = model.parameters


class _Schedule:
    def __init__(
        self, model: nn.Module, staged: StagedModel, batches: Sequence[MicroBatch], end: End, *, calls: bool = True
    ) -> None:
        self.model, self.staged, self.batches, self.end, self.calls = model, staged, batches, end, calls
        self.errors: list[Exception] = []
        counts = [math.prod(rows_and_tokens(batch)) for batch in batches]
        starts = accumulate(counts, initial=0)
        self.tokens = [Tokens(index, *place) for index, place in enumerate(zip(starts, counts, strict=False))]
        for check in staged.checks:
            check(sum(counts))

    def run(self, *, backward: bool) -> Tensor:
        """Run all micro-batches; return the losses."""
        with summing_shared_gradients(self.model, self.staged) if backward else torch.no_grad():
            return self._run(backward)

    def _run(self, backward: bool) -> Tensor:
        step, count = self.staged.schedules, len(self.batches)
        self.shapes = sent_shapes(self.model, self.staged, self.batches)
        stages = [self._stage(stage, backward) for stage in self.staged.stages]
        kind = get_schedule_class(step.schedule_of(count, self.staged.mesh.size()))
        single = issubclass(kind, PipelineScheduleSingle)
        schedule = kind(stages[0] if single else stages, count, loss_fn=lambda loss, _: loss, scale_grads=False)
        losses: list[Tensor] = []
        target = torch.zeros(count, device=device_of(self.model))
        fsdp = self.model if isinstance(self.model, FSDPModule) else None
        try:
            if backward:
                with accumulating(fsdp), unsharded(self.model) if step.splits_backward else nullcontext():
                    schedule.step(target=target, losses=losses, return_outputs=False)
                    if fsdp is not None:
                        stages[0].reduce_gradients(fsdp)
            else:
                schedule.eval(target=target, losses=losses, return_outputs=False)
        except Exception:
            if self.errors:
                raise self.errors[0] from None
            raise
        return self._on_all_ranks(losses)

    def _stage(self, stage: int, backward: bool) -> Stage:
        staged = self.staged
        received = tuple(s.buffer(backward) for s in self.shapes[stage - 1][None]) if stage else ()
        sent: tuple[Tensor, ...] = (torch.empty((), device="meta"),)  # the loss
        if stage < len(staged.ranks) - 1:
            sent = tuple(s.buffer(backward) for s in self.shapes[stage][None])
        parts, group = ModelParameters(self.model), staged.mesh.get_group()
        made = Stage(parts, stage, len(staged.ranks), device_of(self.model), received, sent, group=group)
        made.stage_index_to_group_rank = dict(enumerate(staged.ranks))
        made.forward, made.errors = self._forward, self.errors
        return made

    def _forward(self, stage: int, index: int, tensors: tuple[Tensor, ...]) -> Any:
        staged, count = self.staged, len(self.staged.ranks)
        values = staged.sent[stage - 1] if stage else ()
        shapes = self.shapes[stage - 1][index] if stage else ()
        received: dict[Value, Tensor] = {
            value: shape.received(tensor) for value, shape, tensor in zip(values, shapes, tensors, strict=True)
        }
        run = StageRun(staged, stage, received, self.tokens[index])
        is_last = stage == count - 1
        with running(staged, run):
            called = self.calls or not is_last
            output = self.model(**stage_inputs(self.batches[index], stage, count)) if called else None
            if is_last:
                return self.end(index, output)
        sizes = zip(self.shapes[stage][None], run.sent(), self.shapes[stage][index], strict=True)
        return tuple(largest.sent(tensor, expected) for largest, tensor, expected in sizes)

    def _on_all_ranks(self, losses: list[Tensor]) -> Tensor:
        group, last = self.staged.mesh.get_group(), self.staged.ranks[-1]
        count, device = len(self.batches), device_of(self.model)
        values = torch.zeros(count, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
        if losses:
            values = torch.stack([loss.detach() for loss in losses]).to(values)
        dist.broadcast(values, dist.get_global_rank(group, last), group=group)
        return values


@contextmanager
def accumulating(fsdp: FSDPModule | None) -> Iterator[None]:
    """Let FSDP modules keep the gradients of all micro-batches until they are reduced."""

    def sync(on: bool) -> None:
        if fsdp is not None:
            fsdp.set_is_last_backward(on)
            fsdp.set_reshard_after_backward(on)
            fsdp.set_requires_gradient_sync(on)

    sync(False)
    try:
        yield
    finally:
        sync(True)


def _staged(model: nn.Module, micro_batches: Sequence[MicroBatch], *, any_number: bool = False) -> StagedModel:
    staged: StagedModel | None = getattr(model.__dict__.get(RUNTIME_STATE), "stages", None)
    if staged is None:
        raise ModelError(
            f"{type(model).__name__} is not in pipeline stages: parallelize it on a mesh with pp of 2 or more, with "
            "steps=(Pipeline(...),)"
        )
    if len(micro_batches) != (count := staged.schedules.microbatches) and not any_number:
        raise OptionError(
            f"{len(micro_batches)} micro-batches were given, and the step has Pipeline(microbatches={count}): divide "
            f"the rows of the batch into {count}"
        )
    for index, batch in enumerate(micro_batches):
        if not isinstance(batch, Mapping):
            raise OptionError(
                f"micro-batch {index} is a {type(batch).__name__}: give the model's arguments by name, such as "
                "{'input_ids': tokens}"
            )
        for name in (*RECORDED, "past_key_values", "use_cache"):
            if batch.get(name) is not None and batch[name] is not False:
                raise OptionError(
                    f"micro-batch {index} has {name}, which one stage cannot serve for all blocks: leave it out, or "
                    "use a mesh without pp"
                )
    state_entries(model)  # raises where parameters are offloaded, on all stages
    require_media_on_first_stage(model, staged, micro_batches)
    return staged


def _label_weights(model: Any, micro_batches: Sequence[MicroBatch]) -> list[Any]:
    """Return each micro-batch's share of the labels, by which its mean loss is weighted."""
    if getattr(model, "loss_type", None) not in ("ForCausalLM", "ForConditionalGeneration"):
        raise OptionError(f"the labels of {type(model).__name__} are not next tokens: give a loss")
    for index, batch in enumerate(micro_batches):
        if batch.get("labels") is None:
            raise OptionError(f"micro-batch {index} has no labels, and no loss was given: give one of the two")
    counts = [(batch["labels"][..., 1:] != -100).sum() for batch in micro_batches]
    total = torch.stack(counts).sum().clamp(min=1)
    return [count / total for count in counts]
