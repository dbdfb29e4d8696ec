"""What every phase of a run works with."""

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from report import Report
from rollout import Generator
from settings import Settings
from torch.distributed.device_mesh import DeviceMesh
from trainer import Trainer
from transformers import PreTrainedTokenizerBase

import fsdp_runtime


@dataclass(frozen=True)
class Run:
    """One rank's view of the run.

    Attributes:
        settings: What the user chose.
        mesh: The ranks by axis.
        device: Where this rank computes.
        trainer: The policy that all ranks train together.
        tokenizer: The policy's tokenizer.
        generator: This rank's own copy of the policy, which samples; none where another process does.
        report: Where figures go.
        questions: Draws questions; in the same state on every rank, so that all ranks draw the same ones.
        sampling: Draws tokens; in a state of its own on every rank.
    """

    settings: Settings
    mesh: DeviceMesh
    device: torch.device
    trainer: Trainer
    tokenizer: PreTrainedTokenizerBase
    generator: Generator | None
    report: Report
    questions: random.Random
    sampling: torch.Generator

    @property
    def dp_size(self) -> int:
        """How many parts each batch is dealt into; the ranks of one ``tp`` group train on the same part."""
        return fsdp_runtime.submesh(self.mesh, "dp").size()

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that have the other parts."""
        return fsdp_runtime.submesh(self.mesh, "dp").get_group()

    @property
    def dp_rank(self) -> int:
        """Which part is this rank's."""
        return fsdp_runtime.submesh(self.mesh, "dp").get_local_rank()


def check_divisible(settings: Settings, world_size: int, dp_size: int) -> None:
    """Check that every batch can be dealt evenly to the ranks.

    Raises:
        ValueError: One cannot; the message says which numbers would do.
    """
    samples = settings.prompts * settings.group
    parts = dp_size * settings.updates
    if settings.prompts % world_size:
        raise ValueError(f"--prompts {settings.prompts} must divide by the {world_size} ranks that sample")
    if samples % parts:
        raise ValueError(
            f"--prompts {settings.prompts} times --group {settings.group} makes {samples} samples, which must divide "
            f"by {parts}: {dp_size} data-parallel ranks times --updates {settings.updates}"
        )
    if settings.warmup_batch % dp_size:
        raise ValueError(f"--warmup-batch {settings.warmup_batch} must divide by {dp_size} data-parallel ranks")


def scheduled(peak: float, step: int, steps: int, rise: int = 5) -> float:
    """The learning rate of a step (counted from zero): a short linear rise, then a linear fall to a tenth."""
    return peak * min(1.0, (step + 1) / rise) * max(0.1, 1.0 - step / steps)


def mean_and_max(values: torch.Tensor) -> tuple[float, float]:
    """Mean and maximum of a one-dimensional tensor of which every rank holds a part, possibly an empty one."""
    total = torch.stack([values.sum(), torch.full_like(values.sum(), values.numel())])
    largest = values.max() if values.numel() else total.new_zeros(())
    dist.all_reduce(total)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return (total[0] / total[1]).item(), largest.item()
