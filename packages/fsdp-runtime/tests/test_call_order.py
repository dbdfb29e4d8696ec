"""Public functions in any order, on two ranks: each call returns or raises a typed error, the same on both ranks."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_runtime
from fsdp_runtime import FSDP2, MeshSpec
from harness.ranks import RankPool
from tp_plans import ColwiseParallel, Plan, RowwiseParallel, TpPlansError

TYPED = (fsdp_runtime.FsdpRuntimeError, TpPlansError)
#: Enough for each pair of neighbouring calls that went wrong before.
SEQUENCES, LENGTH = 25, 5
PLAN = Plan({"layers.*.0": ColwiseParallel(), "layers.*.1": RowwiseParallel()})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + 1


class Run:
    """A model, its optimizer and a folder, and the calls that may be made in any order."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model: Any = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.folder = folder
        self.mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
        self.tp_mesh = MeshSpec(tp=2).build(device_type="cpu")

    def shard(self) -> None:
        fsdp_runtime.parallelize(self.model, self.mesh, plan=None)

    def split(self) -> None:
        fsdp_runtime.parallelize(self.model, self.tp_mesh, plan=PLAN)

    def shard_with_options(self) -> None:
        options = FSDP2(prefetch_forward=1, reshard_after_forward=False)
        fsdp_runtime.parallelize(self.model, self.mesh, plan=None, activation_checkpointing="block", fsdp=options)

    def new_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def forward(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, 4))

    def train(self) -> None:
        self.model(torch.ones(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accumulate(self) -> None:
        with fsdp_runtime.no_sync(self.model):
            self.model(torch.ones(2, 4)).square().mean().backward()

    def gathered(self) -> None:
        with fsdp_runtime.unsharded(self.model), fsdp_runtime.unsharded(self.model):
            self.forward()

    def gathered_and_offloaded(self) -> None:
        with fsdp_runtime.unsharded(self.model):
            self.offload()

    def offload(self) -> None:
        fsdp_runtime.offload(self.model, self.optimizer, device="cpu")

    def offload_some(self) -> None:
        fsdp_runtime.offload(self.model, parts=("gradients",), device="cpu")

    def onload(self) -> None:
        fsdp_runtime.onload(self.model)

    def onload_some(self) -> None:
        fsdp_runtime.onload(self.model, parts=("parameters",))

    def save(self) -> None:
        fsdp_runtime.save_weights(self.model, self.folder / "weights")

    def load(self) -> None:
        fsdp_runtime.load_weights(self.model, self.folder / "weights")

    def save_state(self) -> None:
        fsdp_runtime.save_training_state(self.folder / "state", self.model, self.optimizer, step=1)

    def load_state(self) -> None:
        fsdp_runtime.load_training_state(self.folder / "state", self.model, self.optimizer)

    def stream(self) -> None:
        for _ in fsdp_runtime.stream_weights(self.model):
            pass

    def stream_a_part(self) -> None:
        next(fsdp_runtime.stream_weights(self.model, bucket_bytes=1))

    def materialize(self) -> None:
        fsdp_runtime.materialize(self.model, "cpu")

    def check(self) -> None:
        fsdp_runtime.assert_finite_gradients(self.model)
        fsdp_runtime.assert_replicas_equal(self.model, self.mesh)
        fsdp_runtime.describe_parallelism(self.model)


CALLS: dict[str, Callable[[Run], None]] = {
    name: call for name, call in vars(Run).items() if callable(call) and not name.startswith("_")
}


@contextmanager
def _shared_folder() -> Iterator[Path]:
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    yield Path(found[0])


def _outcomes() -> list[tuple[list[str], str]]:
    """What each sequence of calls ended in that is neither a result nor a typed error on every rank."""
    wrong = []
    chosen = random.Random(0)
    for _ in range(SEQUENCES):
        names = chosen.choices(list(CALLS), k=LENGTH)
        with _shared_folder() as folder:
            run = Run(folder)
            for index, name in enumerate(names):
                outcome: str | None = None
                try:
                    CALLS[name](run)
                except TYPED as error:
                    outcome = type(error).__name__
                except Exception as error:  # noqa: BLE001  # what the test looks for
                    wrong.append((names[: index + 1], f"{type(error).__name__}: {error}"))
                    outcome = "other"
                outcomes: list[str | None] = [None] * dist.get_world_size()
                dist.all_gather_object(outcomes, outcome)
                if len({each == "other" for each in outcomes}) > 1 or outcome == "other":
                    break  # the model is in no state to go on
                if len({each is None for each in outcomes}) > 1:
                    wrong.append((names[: index + 1], f"not the same on the ranks: {outcomes}"))
                    break
            with suppress(*TYPED):
                fsdp_runtime.onload(run.model)
    return wrong


def test_calls_in_any_order_return_or_are_refused(two_ranks: RankPool) -> None:
    for wrong in two_ranks.run(_outcomes, timeout=300):
        assert wrong == []
