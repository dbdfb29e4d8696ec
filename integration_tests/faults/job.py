"""The training job that the campaign breaks: one of its ranks.

Every loss goes to a file of the rank's own, in full precision.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import fsdp_runtime
from faults.inject import Fault, InjectedFault
from fsdp_runtime.monitor import monitor_ranks, stop_on_signal
from fsdp_runtime.optim import CPUOffloadAdamW, LowBitAdamW
from fsdp_runtime.steps import ActivationCheckpointing, Pipeline, Quantized, forward_backward
from harness.models import tiny_inputs, tiny_model

#: A state is saved after every so many steps.
SAVE_EVERY = 2


@dataclass(frozen=True)
class Settings:
    """What the job is to do.

    Args:
        folder: for the losses, in files of the ranks.
        states: the directory of training states.
        resume: a state, or the directory for the newest; nothing to begin.
        steps: how many there are in all.
        timeout: of ``monitor_ranks``, in seconds.
        fault: what happens on one rank.
        axes: of the mesh.
        levers: options that save memory: none, ``"host"`` (adapters on a base in nf4, with their optimizer and the
            activations on the host) or ``"8bit"`` (moments of all parameters).
    """

    folder: str
    states: str
    resume: str | None
    steps: int
    timeout: float
    fault: Fault | None
    axes: Mapping[str, int]
    levers: str = ""

    @property
    def ranks(self) -> int:
        """How many the mesh has."""
        return math.prod(self.axes.values())


class Training:
    """Model, optimizer and scheduler; steps draw noise, so that random states matter."""

    def __init__(self, axes: Mapping[str, int], levers: str = "") -> None:
        mesh = fsdp_runtime.MeshSpec(**axes).build(device_type="cpu")
        self.has_stages = "pp" in axes
        model = tiny_model("Qwen3ForCausalLM", dtype=torch.float32, tied=self.has_stages)
        options: dict[str, Any] = {"sequence_parallel": "tp" in axes}
        if levers == "host":
            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
            options["activation_checkpointing"] = ActivationCheckpointing("block", offload=True)
            options["steps"] = (Quantized("nf4", block_size=16),)
        if self.has_stages:
            options["steps"] = (Pipeline(microbatches=4),)
        self.model = fsdp_runtime.parallelize(model, mesh, **options)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: Any = {
            "": lambda: AdamW(trained, lr=1e-3, fused=True),
            "host": lambda: CPUOffloadAdamW(trained, lr=1e-3, fraction=0.7),
            "8bit": lambda: LowBitAdamW(trained, lr=1e-3),
        }[levers]()
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=20)
        self._saving: Any = None
        torch.manual_seed(fsdp_runtime.submesh(mesh, "dp").get_local_rank())

    def loss(self) -> torch.Tensor:
        logits = self.model(**tiny_inputs(self.model, batch=2, length=7), use_cache=False).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return (logits + 0.1 * torch.randn_like(logits)).square().mean()

    def scheduled(self) -> torch.Tensor:
        """Run all micro-batches of a step forward and backward over pipeline stages."""

        def loss(output: Any, _: Any) -> torch.Tensor:
            logits = output.logits
            return (logits + 0.1 * torch.randn_like(logits)).square().mean() / 4

        return forward_backward(self.model, [tiny_inputs(self.model, batch=2, length=7)] * 4, loss).sum()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def save(self, states: str, step: int, *, asynchronous: bool) -> None:
        arguments = {"step": step, "scheduler": self.scheduler}
        if asynchronous:
            self._saving = fsdp_runtime.save_training_state(
                states, self.model, self.optimizer, asynchronous=True, **arguments
            )
        else:
            fsdp_runtime.save_training_state(states, self.model, self.optimizer, **arguments)

    def wait(self) -> None:
        """Wait for the save that goes on, if there is one."""
        if self._saving is not None:
            self._saving.wait()

    def load(self, states: str) -> int:
        state = fsdp_runtime.load_training_state(states, self.model, self.optimizer, scheduler=self.scheduler)
        return state.step


def train(settings: Settings) -> None:
    """Train as a user's loop does, and write down every loss."""
    torch.set_num_threads(1)
    training = Training(settings.axes, settings.levers)
    injected = InjectedFault(settings.fault, training.model, Path(settings.folder), training.optimizer)
    asynchronous = settings.fault is not None and settings.fault.phase == "asynchronous save"
    losses = Path(settings.folder, f"losses-{dist.get_rank()}.jsonl")
    with (
        stop_on_signal() as must_stop,
        monitor_ranks(timeout=settings.timeout) as monitor,
        losses.open("a") as file,
    ):
        with monitor.phase("load"):
            first = training.load(settings.resume) if settings.resume else 0
        for step in range(first, settings.steps):
            injected.begin(step)
            if training.has_stages:
                with monitor.phase("schedule"):
                    loss = training.scheduled()
            else:
                with monitor.phase("forward"):
                    loss = training.loss()
                with monitor.phase("backward"):
                    loss.backward()
            with monitor.phase("update"):
                training.update()
            record(file, step, loss)
            last = must_stop()
            if last or (step + 1) % SAVE_EVERY == 0:
                with monitor.phase("save"):
                    training.wait()
                    injected.saving(step)
                    training.save(settings.states, step + 1, asynchronous=asynchronous)
            with monitor.phase("stream"):
                for number, _ in enumerate(fsdp_runtime.stream_weights(training.model, bucket_bytes=2**14)):
                    injected.streamed(number)
            if last:
                break
    dist.destroy_process_group()


def record(file: Any, step: int, loss: torch.Tensor) -> None:
    """A line that is on the disk before anything can kill the process."""
    file.write(json.dumps({"step": step, "loss": loss.item().hex()}) + "\n")
    file.flush()


def losses(folder: Path) -> list[dict[int, str]]:
    """What a job recorded: for each rank, the losses by step."""
    found = []
    for file in sorted(folder.glob("losses-*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found.append({line["step"]: line["loss"] for line in lines})
    return found
