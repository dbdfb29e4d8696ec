"""Injection of one fault into one rank of the job: at a step, in a phase, by means of the operating system."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_runtime.model import inspect_model
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter

#: Name of the file that is made when the fault strikes.
STRUCK = "struck"
#: Bytes that a file may have on a disk that takes no more: fewer than a rank's part of a state.
FULL_AT = 2**16


@dataclass(frozen=True)
class Fault:
    """The kind of a fault, and the rank, step and phase that it strikes.

    Args:
        kind: ``"kill"`` (SIGKILL), ``"stop"`` (SIGSTOP), ``"terminate"`` (SIGTERM), ``"full"`` (no file may grow, as
            on a full disk), ``"raise"``.
        phase: ``"forward"``, ``"backward"``, ``"save"``, ``"asynchronous save"`` or ``"stream"``; of stages also
            ``"warm-up"`` and ``"steady"`` (forwards of the first and third micro-batch), ``"reduce"`` and ``"update"``.
        rank: on which rank.
        step: in which step.
    """

    kind: str
    phase: str
    rank: int
    step: int


class InjectedFault:
    """A fault that waits for its step and phase; on other ranks it does nothing."""

    def __init__(self, fault: Fault | None, model: nn.Module, folder: Path, optimizer: Any = None) -> None:
        self._fault = fault if fault is not None and fault.rank == dist.get_rank() else None
        self._struck, self._step = folder / STRUCK, -1
        self._saved: int | None = None
        self._forwards = 0
        structure = inspect_model(model)
        stages = runtime_state(model).stages
        last = -1 if stages is None else max(end for _, end in stages.blocks_by_stage.values())
        block = structure.blocks[structure.decoder[last]]
        match self._fault.phase if self._fault else None:
            case "warm-up" | "steady" as moment:
                number = 1 if moment == "warm-up" else 3
                block.register_forward_hook(lambda *args: self._in_forward(number))
            case "reduce":
                self._before_sums(model)
            case "update":
                optimizer.register_step_pre_hook(lambda *args: self._strike())
            case "forward":
                block.register_forward_hook(lambda *args: self._strike())
            case "backward":
                block.register_forward_hook(lambda module, inputs, output: self._in_backward(output))
            case "save" | "asynchronous save":
                self._in_save()

    def begin(self, step: int) -> None:
        self._forwards = 0
        if self._step != self._saved:  # a save of that step may go on
            self._step = step

    def saving(self, step: int) -> None:
        """A save begins, and no other one is being written."""
        self._saved = step if self._fault is not None and self._fault.step == step else None

    def streamed(self, number: int) -> None:
        if self._fault is not None and self._fault.phase == "stream" and number == 3:
            self._strike()

    def _in_backward(self, output: Any) -> None:
        first: Tensor = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(lambda gradient: self._strike())

    def _in_forward(self, number: int) -> None:
        self._forwards += 1
        if self._forwards == number:
            self._strike()

    def _before_sums(self, model: nn.Module) -> None:
        """Strike in the sum of a tied embedding's gradients over stages."""
        exchange = dist.batch_isend_irecv

        def strike_and_exchange(operations: list[Any]) -> Any:
            embedding = model.get_input_embeddings().weight.numel()  # type: ignore[operator]
            if any(each.tensor.numel() == embedding for each in operations):
                self._strike()
            return exchange(operations)

        dist.batch_isend_irecv = strike_and_exchange

    def _in_save(self) -> None:
        write = SafetensorsWriter.write

        def strike_and_write(file: SafetensorsWriter, name: str, tensor: Tensor, start: int = 0) -> int:
            if self._saved is not None:
                self._strike()
            return write(file, name, tensor, start)

        SafetensorsWriter.write = strike_and_write  # type: ignore[method-assign]

    def _strike(self) -> None:
        if self._fault is None or self._step != self._fault.step or self._struck.exists():
            return
        self._struck.touch()
        match self._fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "full":
                # Python ignores SIGXFSZ, so that writing fails, as it does on a full disk.
                resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT, resource.RLIM_INFINITY))
            case "raise":
                raise ValueError("injected: the data of this rank is broken")
