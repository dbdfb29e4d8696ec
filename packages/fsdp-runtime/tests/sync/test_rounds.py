"""Rounds of a transfer: bounded, complete, the same for all, and executed by ranks that are simulated."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tp_plans
from fsdp_runtime import OptionError
from fsdp_runtime.sharded.boxes import Chunk, inside, stored_part
from fsdp_runtime.sync.execute import (
    Message,
    Round,
    Sides,
    aligned,
    box_views,
    fits_in_one_round,
    message_values,
    rounds_of,
    split_transfers,
    windows_of,
)
from tp_plans import Replicate, Shard
from tp_plans.boxes import StridedShard
from tp_plans.transfer import CheckpointTensor, EngineSize, TransferLayout, TransferPlan

MESHES = [(2,), (3,), (7,), (8,), (2, 2), (3, 2), (2, 2, 2)]
SHAPES = {
    **{f"model.layers.0.self_attn.{n}_proj.weight": (r, 12) for n, r in (("q", 32), ("k", 8), ("v", 8))},
    "model.layers.0.mlp.gate.weight": (6, 12),
    **{f"model.layers.0.mlp.experts.{e}.{n}_proj.weight": (8, 12) for e in range(6) for n in ("gate", "up")},
    **{f"model.layers.0.mlp.experts.{e}.down_proj.weight": (12, 8) for e in range(6)},
    "model.embed_tokens.weight": (67, 12),
    "model.norm.weight": (12,),
}
DTYPES = ("bfloat16", "float32", "uint8")


def _values(layout: TransferLayout, full: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The local tensors of a rank, cut from full tensors by the layout."""
    local = {name: torch.zeros(shape) for name, shape in layout.local_shapes(rank).items()}
    for name, tensor in full.items():
        for part, view in box_views(layout, rank, local, name, tuple((0, size) for size in tensor.shape)):
            view.copy_(tensor[tuple(slice(*side) for side in part)])
    return local


@st.composite
def plans(draw: Any) -> TransferPlan:
    tensors = {name: CheckpointTensor(shape, draw(st.sampled_from(DTYPES))) for name, shape in SHAPES.items()}
    mesh = draw(st.sampled_from(MESHES))
    stacked = draw(st.booleans())
    plain = {name: tensor for name, tensor in tensors.items() if not (stacked and ".experts." in name)}
    source = tp_plans.transfer.mesh_layout(plain, mesh, {name: _layouts(draw, mesh, t) for name, t in plain.items()})
    source = source.union(_stacked(draw, tensors, mesh)) if stacked else source
    first, relay = draw(st.sampled_from([0, 2, len(source.ranks)])), draw(st.booleans())
    if draw(st.booleans()):
        tp, ep = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)]))
        size = EngineSize(num_attention_heads=8, num_key_value_heads=2, tp=tp, ep=ep)
        return tp_plans.transfer.plan_transfer(
            source, tp_plans.transfer.engine_layout(tensors, size).shifted(first), relay=relay
        )
    mesh = draw(st.sampled_from(MESHES))
    layouts = {name: _layouts(draw, mesh, t) for name, t in tensors.items()}
    return tp_plans.transfer.plan_transfer(
        source, tp_plans.transfer.mesh_layout(tensors, mesh, layouts).shifted(first), relay=relay
    )


def _stacked(draw: Any, tensors: dict[str, CheckpointTensor], mesh: tuple[int, ...]) -> TransferLayout:
    """Experts that the model keeps in two stacks, each over the mesh in any way, as over ``ep`` and FSDP2."""
    blocks: dict[str, list[tp_plans.transfer.StoredBlock]] = {}
    for stack, shape, parts in (("gate_up", (6, 16, 12), ("gate", "up")), ("down", (6, 12, 8), ("down",))):
        boxes = tp_plans.boxes.mesh_boxes(shape, mesh, _layouts(draw, mesh, CheckpointTensor(shape)))
        rows = shape[1] // len(parts)
        for expert in range(shape[0]):
            for number, part in enumerate(parts):
                target = ((0, rows), (0, shape[2]))
                chunk = Chunk(stack, target, (expert, number * rows, 0), (1, 2))
                blocks[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"] = [
                    block for rank, box in enumerate(boxes) for block in stored_part(chunk, rank, box)
                ]
    return TransferLayout({name: tensors[name] for name in blocks}, blocks)


def _layouts(draw: Any, mesh: tuple[int, ...], tensor: CheckpointTensor) -> tuple[Any, ...]:
    dims = st.integers(0, len(tensor.shape) - 1)
    kind = st.one_of(st.just(Replicate()), dims.map(Shard), dims.map(StridedShard))
    return tuple(draw(st.tuples(*[kind] * len(mesh))))


@settings(max_examples=10)
@given(plans(), st.sampled_from([8, 40, 1000, 10**6]))
def test_schedule_fills_every_destination_within_a_bucket_per_rank(plan: TransferPlan, bucket: int) -> None:
    full = {name: torch.randint(0, 100, shape).float() for name, shape in SHAPES.items()}
    sides = {
        rank: Sides(
            plan,
            rank,
            _values(plan.source, full, rank),
            {name: torch.full(shape, -1.0) for name, shape in plan.destination.local_shapes(rank).items()},
        )
        for rank in plan.ranks
    }
    received = dict.fromkeys(plan.ranks, 0)
    for each in split_transfers(plan, plan.transfers, bucket):
        if each.is_local:
            sides[each.source].write(each, sides[each.source].read(each))
    own = {rank: split_transfers(plan, plan.for_rank(rank), bucket) for rank in plan.ranks}
    windows = max(windows_of(plan, each, bucket) for each in own.values())
    rounds = {rank: rounds_of(plan, each, windows) for rank, each in own.items()}
    for messages in itertools.chain(*rounds.values()):
        assert sum(aligned(each.nbytes) for each in messages) <= bucket
    if fits_in_one_round(plan, bucket):
        assert windows == 1
    for message in _in_turn(rounds):
        run = torch.empty(message.nbytes, dtype=torch.uint8)
        for each, values in message_values(plan, message, run):
            sides[message.source].read(each, values)
        for each, values in message_values(plan, message, run):
            sides[message.destination].write(each, values)
        received[message.destination] += message.nbytes
    for rank in plan.ranks:
        assert received[rank] == plan.bytes_received(rank)
        wanted = _values(plan.destination, full, rank)
        for name, tensor in sides[rank].destination.items():
            assert torch.equal(tensor, wanted[name])


def _in_turn(rounds: dict[int, list[Round]]) -> Iterator[Message]:
    """The messages in the order in which ranks come to them, if each waits for all of its round."""
    waiting = {rank: list(reversed(own)) for rank, own in rounds.items() if own}
    open_now: dict[int, Counter[Message]] = {rank: Counter(own.pop()) for rank, own in waiting.items()}
    while open_now:
        ready = {message for found in open_now.values() for message in found if _is_open(open_now, message)}
        assert ready, "the ranks wait for one another"
        for message in ready:
            yield message
            for rank in (message.source, message.destination):
                del open_now[rank][message]
        for rank in [rank for rank, found in open_now.items() if not found]:
            if waiting[rank]:
                open_now[rank] = Counter(waiting[rank].pop())
            else:
                del open_now[rank]


def _is_open(open_now: dict[int, Counter[Message]], message: Message) -> bool:
    return all(message in open_now.get(rank, ()) for rank in (message.source, message.destination))


def test_a_bucket_below_the_widest_element_is_refused() -> None:
    tensors = {"w": CheckpointTensor((4,))}
    one = tp_plans.transfer.mesh_layout(tensors, (1,), {"w": [Replicate()]})
    with pytest.raises(OptionError, match="bucket_bytes=7: give 8 or more"):
        split_transfers(tp_plans.transfer.plan_transfer(one, one), [], 7)


def test_a_part_of_a_box_is_counted_from_the_box() -> None:
    assert inside(((4, 9), (0, 3)), ((5, 6), (0, 2))) == (slice(1, 2), slice(0, 2))
