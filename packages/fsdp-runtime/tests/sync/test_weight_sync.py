"""Updates along a chain of versions: exact, small, and full again wherever the chain is broken."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tp_plans
from fsdp_runtime import OptionError, parallelize
from fsdp_runtime.sync import ModelShards, WeightExport, WeightSync, WeightSyncError, verify_transfer
from harness.models import tiny_model
from harness.ranks import RankPool
from tp_plans.transfer import EngineSize, TransferLayout


def _train(model: nn.Module, share: float, step: int) -> None:
    """Change about a share of a model's elements, by more than bfloat16 rounds off."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            chosen = torch.rand(local.shape, generator=generator) < share
            local[chosen] = local[chosen] * -1.5 - 0.1


class _Pair:
    """Ranks 0 and 1 train with tp=2, ranks 2 and 3 are an engine with tp=2, or two with tp=1."""

    def __init__(self, *, replicas: int = 1, relay: bool = False) -> None:
        self.rank = dist.get_rank()
        told: list[Any] = [None]
        mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp_shard", "tp"))
        if self.rank < 2:
            self.model = parallelize(tiny_model("Qwen3ForCausalLM", dtype=torch.float32), mesh)
            self.shards = ModelShards(self.model, export=WeightExport(dtype=torch.bfloat16))
            told = [self.shards.layout.to_json()]
        dist.broadcast_object_list(told, src=0)
        source = TransferLayout.from_json(told[0])
        size = EngineSize(num_attention_heads=4, num_key_value_heads=4, tp=2 // replicas)
        engine = tp_plans.transfer.engine_layout(source.tensors, size, replicas=replicas, first_rank=2)
        self.plan = tp_plans.transfer.plan_transfer(source, engine, relay=relay)
        self.engine = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in engine.local_shapes(self.rank).items()}

    @property
    def sides(self) -> dict[str, Any]:
        """The arguments of transfers on this rank."""
        return {"source": self.shards.local if self.rank < 2 else None, "destination": self.engine}

    def sync(self, **options: Any) -> WeightSync:
        """A new end of the updates on this rank."""
        return WeightSync(self.plan, **self.sides, bucket_bytes=50_000, timeout=timedelta(seconds=60), **options)


def _chain() -> list[tuple[int, tuple[int, ...], float]]:
    """Versions, full ranks and bytes beside full ones of several updates, each verified; restarts on the way."""
    pair = _Pair()
    sync, found = pair.sync(), []

    def update(version: int) -> None:
        report = sync.update(version)
        verify_transfer(pair.plan, **pair.sides)
        assert report.version == sync.version == version
        moved = torch.tensor([report.bytes_sent, report.bytes_full], dtype=torch.float64)
        dist.all_reduce(moved)
        found.append((version, report.full_ranks, round(float(moved[0] / moved[1] * 2), 4)))

    def change(share: float, step: int) -> None:
        if pair.rank < 2:
            _train(pair.model, share, step)

    update(1)
    for version, share in ((2, 0.0), (3, 0.001), (7, 0.01), (8, 0.03), (9, 1.0)):
        change(share, version)
        update(version)
    if pair.rank == 3:  # one engine rank restarts
        sync = pair.sync()
        for tensor in pair.engine.values():
            tensor.zero_()
    change(0.01, 10)
    update(10)
    change(0.01, 11)
    update(11)
    if pair.rank < 2:  # the trainer restarts
        sync = pair.sync()
    change(0.01, 12)
    update(12)
    for wrong in (12, 5, -1):  # repeated, out of order, no version
        with pytest.raises(OptionError, match="updates are sent once, in order"):
            sync.update(wrong)
    with pytest.raises(OptionError, match="give the same"):
        sync.update(20 + pair.rank)
    change(0.01, 13)
    update(13)
    return found


def test_updates_are_exact_and_send_full_weights_only_to_ranks_that_missed_one(four_ranks: RankPool) -> None:
    results = four_ranks.run(_chain)
    assert all(result == results[0] for result in results)
    full = {version: ranks for version, ranks, _ in results[0]}
    share = {version: part for version, _, part in results[0]}
    both = (2, 3)
    assert full == {1: both, 2: (), 3: (), 7: (), 8: (), 9: both, 10: (3,), 11: (), 12: both, 13: ()}
    assert share[1] == share[9] == share[12] == 1
    assert share[2] < share[3] < share[7] < share[8] < 0.07
    assert 0.4 < share[10] < 0.6  # the vocabulary is padded: rank 3 has fewer of its rows


def _relayed() -> list[tuple[tuple[int, ...], int, int, int]]:
    """Full ranks of updates of two replicas that pass weights on, with the bytes that trainers and replicas send."""
    pair, found = _Pair(replicas=2, relay=True), []
    sync = pair.sync()
    for version in range(1, 6):
        if pair.rank == 3 and version == 3:  # restarts
            sync = pair.sync()
            for tensor in pair.engine.values():
                tensor.zero_()
        report = sync.update(version)
        verify_transfer(pair.plan, **pair.sides)
        moved = torch.zeros(2, dtype=torch.int64)
        moved[int(pair.rank > 1)] = report.bytes_sent
        dist.all_reduce(moved)
        found.append((report.full_ranks, int(moved[0]), int(moved[1]), pair.plan.destination.bytes_stored(2)))
        if pair.rank < 2:
            _train(pair.model, 0.01, version)
    return found


def test_weight_sync_replicas_pass_bytes_on_that_leave_the_trainer_once(
    four_ranks: RankPool,
) -> None:
    first, *others = four_ranks.run(_relayed)
    assert all(found == first for found in others)
    (full, sent, passed_on, size), *later = first
    assert (full, sent, passed_on) == ((2, 3), size, size)
    assert [ranks for ranks, *_ in later] == [(), (3,), (), ()]
    for ranks, sent, passed_on, _ in later:
        assert (passed_on == 0 and size < sent < 1.1 * size) if ranks else 0 < sent == passed_on < 0.1 * size


def _failed_update(stalled: int) -> str:
    """After a rank stalls in mid-update, what each rank is told; no engine rank changes, and a new group works."""
    pair = _Pair()
    group = dist.new_group([0, 1, 2, 3])
    sync = WeightSync(pair.plan, **pair.sides, group=group, bucket_bytes=50_000, timeout=timedelta(seconds=2))
    sync.update(1)
    before = {name: tensor.clone() for name, tensor in pair.engine.items()}
    if pair.rank < 2:
        _train(pair.model, 0.01, 1)
    if pair.rank == stalled:
        sync._changes.exchange = _stall  # type: ignore[method-assign]
    begun, told = time.monotonic(), ""
    try:
        sync.update(2)
    except WeightSyncError as error:
        told = str(error)
    assert time.monotonic() - begun < 30
    assert all(torch.equal(tensor, before[name]) for name, tensor in pair.engine.items())
    assert sync.version == 1
    dist.barrier()
    fresh = WeightSync(pair.plan, **pair.sides, group=dist.new_group([0, 1, 2, 3]), bucket_bytes=50_000)
    assert fresh.update(3).full_ranks == (2, 3)
    verify_transfer(pair.plan, **pair.sides)
    return told


def _stall(*_: Any) -> tuple[int, dict[int, torch.Tensor]]:
    time.sleep(4)
    raise WeightSyncError("stalled")


@pytest.mark.parametrize("stalled", [pytest.param(0, marks=pytest.mark.slow), 2], ids=["trainer", "engine"])
def test_weight_sync_keeps_old_weights_after_a_stall_and_then_sends_all(four_ranks: RankPool, stalled: int) -> None:
    told = four_ranks.run(_failed_update, stalled)
    assert told[stalled] == "stalled"
    assert all(told)
    assert any(f"with rank {stalled} within 2 s" in each for each in told)


def _failures(kind: str) -> dict[str, Any]:
    """What happens to a full update that goes wrong on rank 3, and to the next: both on one set of ranks."""
    pair, found = _Pair(), {}
    options = {"bucket_bytes": 20_000, "timeout": timedelta(seconds=3), "delta": False}
    group = dist.new_group([0, 1, 2, 3])
    sync = WeightSync(pair.plan, **pair.sides, group=group, **options)
    sync.update(1)
    served = {name: tensor.clone() for name, tensor in pair.engine.items()}
    if pair.rank < 2:
        _train(pair.model, 0.5, 1)
    lost = {"late": 3, "stall": 3, "memory": 3, "trainer": 1}.get(kind)
    if pair.rank == lost and kind in ("stall", "memory", "trainer"):
        if kind == "memory":
            sync._stage = _no_memory  # type: ignore[method-assign]
        else:
            sync._receive = _stalled_receive  # type: ignore[method-assign]
    begun = time.monotonic()
    try:
        if kind == "late" and pair.rank == lost:
            time.sleep(5)
        sync.update(2)
    except (WeightSyncError, MemoryError) as error:
        found["told"] = str(error)
    assert time.monotonic() - begun < 30
    found["kept"] = all(torch.equal(tensor, served[name]) for name, tensor in pair.engine.items())
    found["version"] = sync.version
    dist.barrier()
    vars(sync).pop("_stage", None)  # there is memory again
    if kind != "memory":  # the same group still works where nothing timed out
        sync = WeightSync(pair.plan, **pair.sides, group=dist.new_group([0, 1, 2, 3]), **options)
    found["full"] = sync.update(3).full_ranks
    verify_transfer(pair.plan, **pair.sides)
    found["read back"] = sync.versions()
    return found


def _no_memory(*_: Any) -> None:
    raise MemoryError("no memory to stage an update")


def _stalled_receive(*_: Any, **__: Any) -> None:
    time.sleep(5)
    raise WeightSyncError("stalled")


@pytest.mark.parametrize(
    "kind", ["memory", "late", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("stall", "trainer"))]
)
def test_weight_sync_serves_the_old_version_after_a_failed_full_update(four_ranks: RankPool, kind: str) -> None:
    for rank, found in enumerate(four_ranks.run(_failures, kind)):
        assert found["kept"], (kind, rank)
        assert found["version"] == 1
        assert found["full"] == (2, 3)
        assert found["read back"] == {2: 3, 3: 3}
        if kind == "memory":
            others = "one could not take or did not receive all of it"
            assert (found["told"] == "no memory to stage an update") if rank == 3 else (others in found["told"])
        elif kind == "late":
            assert (rank == 0) == ("ranks 3 did not take part" in found["told"])
            assert rank == 0 or f"rank {rank} had no answer from rank 0" in found["told"]
        else:
            assert found["told"]
            assert (found["told"] == "stalled") == (rank == (3 if kind == "stall" else 1))


def _disagreements() -> dict[str, str]:
    """What ranks are told whose plans, tensors or versions do not fit, before anything is sent."""
    pair, told = _Pair(), {}
    size = EngineSize(num_attention_heads=4, num_key_value_heads=4, tp=1)
    other = tp_plans.transfer.plan_transfer(
        pair.plan.source, tp_plans.transfer.engine_layout(pair.plan.source.tensors, size, replicas=2, first_rank=2)
    )
    larger = {
        name: torch.zeros(s, dtype=torch.bfloat16) for name, s in other.destination.local_shapes(pair.rank).items()
    }
    wrong = WeightSync(other, destination=larger) if pair.rank == 3 else pair.sync()
    try:
        wrong.update(1)
    except WeightSyncError as error:
        told["plan"] = str(error)
    assert all(tensor.eq(0).all() for tensor in (*pair.engine.values(), *larger.values()))
    changes = {
        "missing": lambda engine: engine.pop("model.norm.weight"),
        "shape": lambda engine: engine.update({"model.norm.weight": torch.zeros(7, dtype=torch.bfloat16)}),
        "dtype": lambda engine: engine.update({"model.norm.weight": torch.zeros(64, dtype=torch.float8_e4m3fn)}),
    }
    for name, change in changes.items():
        engine = dict(pair.engine)
        if pair.rank == 2:
            change(engine)
        try:
            WeightSync(pair.plan, source=pair.sides["source"], destination=engine)
        except WeightSyncError as error:
            told[name] = str(error)
    sync = pair.sync()
    sync.update(1)
    before = sync.versions()
    if pair.rank == 3:
        sync = pair.sync()  # restarted
    told["versions"] = str((before, sync.versions()))
    return told


def test_weight_sync_refuses_plans_tensors_and_versions_before_a_byte_is_written(four_ranks: RankPool) -> None:
    results = four_ranks.run(_disagreements)
    for rank, told in enumerate(results):
        assert "ranks 3 were built for another plan than rank 0" in told["plan"]
        assert ("missing" in told) == (rank == 2)
        assert told["versions"] == "({2: 1, 3: 1}, {2: 1, 3: -1})"
    assert "model.norm.weight is missing on rank 2" in results[2]["missing"]
    assert "model.norm.weight has shape (7,) on rank 2" in results[2]["shape"]
    assert "stores model.norm.weight in torch.float8_e4m3fn and is sent torch.bfloat16" in results[2]["dtype"]


def test_without_delta_every_update_is_full_and_in_one_process_too() -> None:
    trained, engine = nn.Linear(64, 64), nn.Linear(64, 64)
    shards, target = ModelShards(trained), ModelShards(engine)
    plan = tp_plans.transfer.plan_transfer(shards.layout, target.layout)
    for delta, staged in ((True, True), (False, True), (False, False)):
        sync = WeightSync(plan, source=shards, destination=target.local, delta=delta, staged=staged)
        for version in (1, 2):
            with torch.no_grad():
                trained.weight.mul_(2)
            sync.update(version)
            assert torch.equal(trained.weight, engine.weight)
