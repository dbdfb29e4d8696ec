"""Log a ``StepMeter``'s values of the steps that a trainer logs: speed, model FLOPs utilization, memory, traffic."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.errors import ModelError
from fsdp_runtime.meters import StepMeter
from fsdp_runtime.steps.compiled_blocks import is_compiled
from fsdp_runtime.wrap import hook_forward

logger = logging.getLogger(__name__)

_AnyTrainer: Any = object


class LogStepValues(_AnyTrainer):
    """Add ``StepMeter``'s values of the logged step to the log of a trainer on a mesh.

    Only these steps are measured (``logging_steps``): measuring waits for the device at the ends of a step and its
    phases.  Bytes sent are counted in the first measured step, unless blocks are compiled.  If the operations of a
    model cannot be counted, it is trained without these values, and the log says why.
    """

    mesh: DeviceMesh
    _measured: _MeasuredSteps | None = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._measured = _MeasuredSteps(self.mesh)
        self.add_callback(self._measured)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; nothing is kept of a step that raises."""
        with ExitStack() as stack:
            if self._measured is not None:
                self._measured.open = stack
            return super().train(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; with a training step's loss, its measured values too."""
        if self._measured is not None and "loss" in logs:
            logs = {**logs, **self._measured.take()}
        super().log(logs, *args, **kwargs)


class _MeasuredSteps(transformers.TrainerCallback):
    """Run a ``StepMeter`` around the logged optimizer steps."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.open = ExitStack()  # the measured step
        self._mesh = mesh
        self._meter: StepMeter | None = None
        self._phase = ExitStack()
        self._measures = self._counted = self._failed = False
        self._values: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """Return the values of the last measured step, once."""
        values, self._values = self._values, {}
        return values

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        step = state.global_step + 1
        every = state.logging_steps if args.logging_strategy == "steps" else 0
        is_logged = (every and step % every == 0) or (step == 1 and args.logging_first_step)
        meter = self._meter_of(model) if is_logged else None
        self._measures = meter is not None
        if meter is None:
            return
        lengths: list[int] = []
        traffic = not self._counted and not any(map(is_compiled, model.modules()))
        self.open.enter_context(meter.step(lengths, count_traffic=traffic))
        self.open.enter_context(_lengths_of_forwards(model, lengths))
        self._counted = True
        self._begin_phase(meter, "forward_backward")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End forward and backward; clipping belongs to them."""
        if self._measures and self._meter is not None:
            self._begin_phase(self._meter, "optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._phase.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._measures and self._meter is not None:
            self.open.close()
            if self._meter.last.tokens:
                self._values = self._meter.last.to_dict()

    def _begin_phase(self, meter: StepMeter, name: str) -> None:
        self._phase.close()
        self._phase = self.open.enter_context(ExitStack())
        self._phase.enter_context(meter.phase(name))

    def _meter_of(self, model: nn.Module) -> StepMeter | None:
        if self._meter is None and not self._failed:
            try:
                self._meter = StepMeter(model, self._mesh)
            except ModelError as error:
                self._failed = True
                logger.info("steps are not measured: %s", error)
        return self._meter


@contextmanager
def _lengths_of_forwards(model: nn.Module, lengths: list[int]) -> Iterator[None]:
    """Add the row lengths of every forward with a backward to ``lengths``."""

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled() and model.training:
            lengths.extend(_lengths(args, kwargs))

    handle = hook_forward(model, "notes lengths of rows", before=note, first=True)
    try:
        yield
    finally:
        handle.remove()


def _lengths(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the tokens of each sequence, padding left out, or of each document of packed rows."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return [int(length) for length in mask.sum(1).tolist()]
    if isinstance(positions, Tensor) and positions.ndim == 2:
        starts = (positions == 0).flatten().nonzero().flatten().tolist()
        if starts and starts[0] == 0:
            ends = [*starts[1:], positions.numel()]
            return [end - start for start, end in zip(starts, ends, strict=True)]
    inputs = [*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    rows = next((each for each in inputs if isinstance(each, Tensor) and each.ndim >= 2), None)
    return [] if rows is None else [rows.shape[1]] * rows.shape[0]
