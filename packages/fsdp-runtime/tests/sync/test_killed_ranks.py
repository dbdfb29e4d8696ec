"""Ranks that are killed in the middle of an update: the others end in time, nothing served changes, and all goes on."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tp_plans
from fsdp_runtime import parallelize
from fsdp_runtime.sync import (
    ModelShards,
    WeightExport,
    WeightSync,
    WeightSyncError,
    execute,
    transfer_group,
    verify_transfer,
)
from harness.models import tiny_model
from harness.processes import preloaded_context
from tp_plans.transfer import EngineSize, TransferLayout, TransferPlan

TIMEOUT = timedelta(seconds=6)


class _Trainer:
    """Two processes with a world of their own, each of which has half of the model; ranks 0 and 1 of transfers."""

    def __init__(self, rank: int, folder: Path, life: int) -> None:
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"world{life}"), 2), rank=rank, world_size=2)
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        self.model = parallelize(tiny_model("Qwen3ForCausalLM", dtype=torch.float32, layers=1), mesh)
        self.shards = ModelShards(self.model, export=WeightExport(dtype=torch.bfloat16))
        (folder / "layout.json").write_text(self.shards.layout.to_json())

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.view(-1)[::7] *= -1.5


class _Member:
    """A rank of transfers: what it holds outlives the groups in which it takes part."""

    def __init__(self, rank: int, folder: Path, life: int) -> None:
        self.rank, self.folder = rank, folder
        self.trainer = _Trainer(rank, folder, life) if rank < 2 else None
        self.tensors: dict[str, torch.Tensor] = {}

    def plan(self, tp: int) -> TransferPlan:
        """The plan for an engine with ``tp``; new tensors for a rank whose part is another than before."""
        source = TransferLayout.from_json((self.folder / "layout.json").read_text())
        size = EngineSize(num_attention_heads=4, num_key_value_heads=4, tp=tp)
        engine = tp_plans.transfer.engine_layout(source.tensors, size, first_rank=2)
        shapes = engine.local_shapes(self.rank)
        if {name: tuple(tensor.shape) for name, tensor in self.tensors.items()} != shapes:
            self.tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        return tp_plans.transfer.plan_transfer(source, engine)

    def join(self, name: str, tp: int) -> tuple[WeightSync, dict[str, Any]]:
        """This rank's end of updates in a new group."""
        store = dist.FileStore(str(self.folder / name), 2 + tp)
        group = transfer_group(store, self.rank, 2 + tp, name=name, timeout=timedelta(seconds=240))
        source = None if self.trainer is None else self.trainer.shards
        sides = {"plan": self.plan(tp), "source": source, "destination": self.tensors, "group": group}
        return WeightSync(**sides, bucket_bytes=20_000, timeout=TIMEOUT), sides

    def break_off(self, victim: int, phase: str) -> dict[str, Any]:
        """Take part in an update in which a rank is killed; its error, and what it holds then."""
        sync, sides = self.join("first", 2)
        sync.update(1)
        before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        if self.trainer is not None:
            self.trainer.step()
        if self.rank == victim:
            if phase == "full":  # half of the messages of a full update are on their way
                sync._chain = 0
                _kill_at_exchange(3)
            else:
                sync._changes.exchange = _kill  # type: ignore[method-assign]
        elif phase == "full":
            sync._chain = 0
        begun, message = time.monotonic(), ""
        try:
            sync.update(2)
        except WeightSyncError as error:
            message = str(error)
        kept = all(torch.equal(tensor, before[name]) for name, tensor in self.tensors.items())
        seconds = time.monotonic() - begun
        dist.destroy_process_group(sides["group"])
        return {"message": message, "seconds": seconds, "kept": kept, "version": sync.version}

    def go_on(self, tp: int) -> dict[str, Any]:
        """Take part in the next update, in a new group."""
        sync, sides = self.join(f"second{tp}", tp)
        full = sync.update(2).full_ranks
        verify_transfer(**sides)
        versions = sync.versions()
        if self.trainer is not None:
            self.trainer.step()
        changed = sync.update(3).full_ranks
        verify_transfer(**sides)
        return {"full": full, "versions": versions, "changed": changed}


def _kill(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_at_exchange(number: int) -> None:
    """Die in one of the rounds of full weights."""
    count, run = iter(range(number)), execute.run_round

    def run_or_die(*arguments: Any) -> None:
        run(*arguments) if next(count, None) is not None else _kill()

    execute.run_round = run_or_die  # this process ends here


def _live(rank: int, folder: Path, life: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    member = _Member(rank, folder, life)
    while (task := connection.recv()) is not None:
        name, *arguments = task
        try:
            connection.send(getattr(member, name)(*arguments))
        except Exception as error:  # noqa: BLE001 (the test says what came)
            connection.send(f"{type(error).__name__}: {error}")


class _Processes:
    """The processes of ranks, which are killed and replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lives = folder, 0
        self._members: dict[int, Any] = {}

    def start(self, *ranks: int) -> None:
        context = preloaded_context()
        self._lives += 1
        for rank in ranks:
            self.end(rank)
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(rank, self._folder, self._lives, theirs), daemon=True)
            process.start()
            theirs.close()
            self._members[rank] = process, ours

    def run(self, name: str, *arguments: Any) -> dict[int, Any]:
        """What each rank returns; ``None`` for a rank that died."""
        for _, connection in self._members.values():
            connection.send((name, *arguments))
        answers = {}
        for rank, (_, connection) in self._members.items():
            try:
                answers[rank] = connection.recv() if connection.poll(300) else "no answer"
            except (EOFError, ConnectionError):
                answers[rank] = None
        return answers

    def end(self, *ranks: int) -> None:
        for rank in ranks or tuple(self._members):
            if rank in self._members:
                process, connection = self._members.pop(rank)
                process.kill()
                process.join()
                connection.close()


@pytest.mark.parametrize(
    ("victim", "phase", "then"),
    [
        (3, "full", 1),  # an engine rank, and the engine comes back with another tp
        pytest.param(1, "full", 2, marks=pytest.mark.slow),  # a trainer rank, and the engine is as it was
        pytest.param(0, "changes", 2, marks=pytest.mark.slow),
        pytest.param(2, "changes", 2, marks=pytest.mark.slow),
        pytest.param(2, "full", 4, marks=pytest.mark.slow),
    ],
)
def test_update_with_a_killed_rank_ends_in_time_and_the_next_succeeds(
    tmp_path: Path, victim: int, phase: str, then: int
) -> None:
    processes = _Processes(tmp_path)
    try:
        processes.start(0, 1, 2, 3)
        answers = processes.run("break_off", victim, phase)
        assert answers.pop(victim) is None
        for rank, answer in answers.items():
            assert answer["message"], rank
            assert answer["seconds"] < 4 * TIMEOUT.total_seconds() + 2
            assert (answer["kept"], answer["version"]) == (True, 1), rank
        if victim < 2:
            processes.start(0, 1)  # a trainer that lost a rank resumes from its checkpoint
        elif then == 2:
            processes.start(victim)
        else:
            processes.end(2, 3)
            processes.start(*range(2, 2 + then))
        engine = tuple(range(2, 2 + then))
        expected = {"full": engine, "versions": dict.fromkeys(engine, 2), "changed": ()}
        assert processes.run("go_on", then) == dict.fromkeys((0, 1, *engine), expected)
    finally:
        processes.end()
