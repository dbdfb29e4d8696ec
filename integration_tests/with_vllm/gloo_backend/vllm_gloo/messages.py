"""What trainer and workers say to each other through vLLM's routes: plain values that JSON can carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sharded.safetensors_io import WeightInfo
from fsdp_runtime.weights.files import split_by_bytes

#: The parts of an update, in order: check what will come, receive it apart, write it into the model.  ``undo`` brings
#: back what the model had before ``apply``.
Action = Literal["check", "receive", "apply", "undo"]


@dataclass
class GlooInit:
    """How a worker joins the trainer's group.

    Args:
        master_address: the trainer's host.
        master_port: the port of its store.
        world_size: the trainer and all workers.
        rank_offset: the rank of the first worker.
        timeout_s: seconds after which an operation that a rank misses fails.
        group: what names the group.
    """

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    timeout_s: float = 60.0
    group: str = ""


@dataclass
class GlooUpdate:
    """A part of an update.

    Args:
        action: which part.
        names: the tensors, for ``check``.
        dtype_names: their dtypes by torch's names.
        shapes: their full shapes.
        bucket_bytes: bytes that are broadcast together.
        group: the group in which they will be.
        number: counts the parts of a group's updates; the worker reports under it.
    """

    action: Action
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    bucket_bytes: int = 0
    group: str = ""
    number: int = 0

    @staticmethod
    def check(weights: Sequence[WeightInfo], bucket_bytes: int) -> GlooUpdate:
        """Return the first part of an update."""
        return GlooUpdate(
            "check",
            [weight.name for weight in weights],
            [dtype_name(weight.dtype) for weight in weights],
            [list(weight.shape) for weight in weights],
            bucket_bytes,
        )

    @property
    def tensors(self) -> tuple[list[str], list[str], list[list[int]]]:
        """Names, dtypes and shapes."""
        return self.names, self.dtype_names, self.shapes

    def weights(self) -> list[WeightInfo]:
        """Return the tensors.

        Raises:
            WeightSyncError: a dtype that this torch does not know, a repeated name, or lists of different lengths.
        """
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise WeightSyncError("names, dtypes and shapes of the update differ in number")
        if len(set(self.names)) < len(self.names):
            repeated = next(name for name in self.names if self.names.count(name) > 1)
            raise WeightSyncError(f"{repeated} comes twice in the update")
        found = []
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            known = getattr(torch, dtype, None)
            if not isinstance(known, torch.dtype):
                raise WeightSyncError(f"{name} has dtype {dtype}, which torch {torch.__version__} does not know")
            found.append(WeightInfo(name, known, tuple(shape)))
        return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, without the module."""
    return str(dtype).removeprefix("torch.")


def buckets(weights: Sequence[WeightInfo], bucket_bytes: int) -> Iterator[list[WeightInfo]]:
    """Yield the weights that are broadcast as one flat tensor; both sides divide alike."""
    yield from split_by_bytes(weights, bucket_bytes)
