"""Calls of ``tp_plans.transfer``: layouts and transfers over tensors, experts and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from growth.measure import Case
from growth.models import matrices
from tp_plans import Replicate, Shard
from tp_plans.boxes import full_box
from tp_plans.transfer import (
    CheckpointTensor,
    EngineSize,
    StoredBlock,
    TransferLayout,
    engine_layout,
    mesh_layout,
    plan_cover,
    plan_transfer,
)

TENSORS = (10, 30, 100, 300, 1000)
Split = Replicate | Shard
RANKS = (16, 48, 160, 480, 1600)


def mesh(tensors: int, ranks: int, layout: Split) -> TransferLayout:
    """Matrices on ranks, all in one layout."""
    shapes = matrices(tensors, 3200, 64)
    return mesh_layout(shapes, (ranks,), {name: [layout] for name in shapes})


def _planned(
    source: Replicate | Shard, destination: Replicate | Shard, *, in_place: bool = False, **options: Any
) -> Any:
    def make(size: int) -> Callable[[], Any]:
        have = mesh(2, size, source)
        want = mesh(2, size, destination)
        want = want if in_place else want.shifted(size)
        return lambda: plan_transfer(have, want, **options).for_rank(0)

    return make


def _planned_tensors(size: int) -> Callable[[], Any]:
    source, destination = mesh(size, 8, Shard(0)), mesh(size, 4, Shard(1)).shifted(8)

    def call() -> Any:
        plan = plan_transfer(source, destination)
        return plan.fingerprint(), plan.ranks, [plan.bytes_sent(rank) for rank in plan.ranks]

    return call


def _experts(count: int) -> dict[str, CheckpointTensor]:
    names = [f"model.layers.0.mlp.experts.{expert}.{n}_proj.weight" for expert in range(count) for n in ("gate", "up")]
    return {name: CheckpointTensor((2400, 32)) for name in names}


def _engine(count: int, ranks: int, ep: int = 1) -> Callable[[], Any]:
    tensors, size = _experts(count), EngineSize(num_attention_heads=ranks, tp=ranks, ep=ep)
    return lambda: engine_layout(tensors, size)


def experts_on_ranks(size: int) -> TransferLayout:
    """As many experts as ranks, each on one rank."""
    tensors = _experts(size)
    blocks: dict[str, Sequence[StoredBlock]] = {
        name: [StoredBlock(number // 2, full_box(tensor.shape), name, (0, 0), (0, 1))]
        for number, (name, tensor) in enumerate(tensors.items())
    }
    return TransferLayout(tensors, blocks)


def _planned_experts(size: int) -> Callable[[], Any]:
    source = experts_on_ranks(size)
    return lambda: plan_transfer(source, source.shifted(size)).for_rank(0)


def _layout_json(size: int) -> Callable[[], Any]:
    layout = mesh(size, 8, Shard(0))
    return lambda: TransferLayout.from_json(layout.to_json())


def _questions(size: int) -> Callable[[], Any]:
    layout = mesh(10, size, Shard(0))
    return lambda: [(layout.bytes_stored(rank), layout.local_shapes(rank)) for rank in layout.ranks]


def _cover(ranks: int, layout: Split) -> Callable[[], Any]:
    stored = mesh(10, ranks, layout)
    return lambda: plan_cover(stored)


CASES = [
    Case("mesh_layout: tensors", TENSORS, lambda size: lambda: mesh(size, 8, Shard(0))),
    Case("mesh_layout: ranks", RANKS, lambda size: lambda: mesh(10, size, Shard(0))),
    Case("engine_layout: experts", TENSORS, lambda size: _engine(size, 8)),
    Case("engine_layout: ranks", (24, 80, 240, 800, 2400), lambda size: _engine(4, size)),
    Case("engine_layout, an expert a rank: experts and ranks", (8, 24, 80, 240, 800), lambda s: _engine(s, s, s)),
    Case("bytes and shapes of each rank: ranks", RANKS, _questions),
    Case("TransferLayout.to_json and from_json: tensors", TENSORS, _layout_json),
    Case("plan_transfer, fingerprint and totals: tensors", TENSORS, _planned_tensors),
    Case("plan_transfer, rows to the same rows: ranks", RANKS, _planned(Shard(0), Shard(0))),
    Case("plan_transfer in place, rows to the same rows: ranks", RANKS, _planned(Shard(0), Shard(0), in_place=True)),
    Case("plan_transfer, copies to copies: ranks", RANKS, _planned(Replicate(), Replicate())),
    Case("plan_transfer, copies to rows: ranks", RANKS, _planned(Replicate(), Shard(0))),
    Case("plan_transfer, copies to copies by relay: ranks", RANKS, _planned(Replicate(), Replicate(), relay=True)),
    Case("plan_transfer, rows to the same rows by relay: ranks", RANKS, _planned(Shard(0), Shard(0), relay=True)),
    Case("plan_transfer, an expert a rank: experts and ranks", RANKS, _planned_experts),
    Case("plan_cover of rows: ranks", RANKS, lambda size: _cover(size, Shard(0))),
    Case("plan_cover of copies: ranks", RANKS, lambda size: _cover(size, Replicate())),
]
