"""Transfer plans: every element where it belongs, each once, and the work shared out."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tp_plans
from tp_plans import PlanError, Replicate, Shard
from tp_plans.boxes import StridedShard, full_box, intersection, volume
from tp_plans.transfer import CheckpointTensor, StoredBlock, TransferError

on_any_machine = settings(deadline=None, max_examples=30)

MESHES = [(2,), (3,), (5,), (8,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 2, 2), (2, 4)]


@st.composite
def layouts(draw, tensors, first_rank=0):
    """A layout on a random mesh: shards on any dims, strided ones included, replicas."""
    mesh = draw(st.sampled_from(MESHES))
    chosen = {}
    for name, tensor in tensors.items():
        dims = st.integers(0, len(tensor.shape) - 1)
        kinds = st.one_of(st.just(Replicate()), dims.map(Shard), dims.map(StridedShard))
        chosen[name] = draw(st.tuples(*[kinds] * len(mesh)))
    return tp_plans.transfer.mesh_layout(tensors, mesh, chosen).shifted(first_rank)


@st.composite
def pairs(draw):
    shape = st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 7), st.integers(1, 6)))
    tensors = {f"w{i}": CheckpointTensor(draw(shape), draw(st.sampled_from(["bfloat16", "float32"]))) for i in range(3)}
    overlap = draw(st.sampled_from([0, 1, 16]))  # the same ranks on both sides, some of them, none
    return draw(layouts(tensors)), draw(layouts(tensors, overlap))


def indices(box):
    return itertools.product(*(range(start, stop) for start, stop in box))


def arrived(plan, transfers=None):
    """How often each element of each tensor reaches each rank; fails where the sender does not store it."""
    counts = Counter()
    for each in plan.transfers if transfers is None else transfers:
        held = set().union(*(set(indices(b.box)) for b in plan.source.stored(each.source, each.tensor)))
        assert set(indices(each.box)) <= held
        counts.update((each.destination, each.tensor, index) for index in indices(each.box))
    return counts


@on_any_machine
@given(pairs())
def test_each_element_reaches_each_rank_that_stores_it_once(pair):
    plan = tp_plans.transfer.plan_transfer(*pair)
    wanted = {
        (block.rank, name, index)
        for name in plan.destination.tensors
        for block in plan.destination.blocks(name)
        for index in indices(block.box)
    }
    assert arrived(plan) == Counter(wanted)


@on_any_machine
@given(pairs())
def test_bytes_received_are_the_bytes_stored_minus_those_the_rank_has(pair):
    plan = tp_plans.transfer.plan_transfer(*pair)
    for rank in plan.ranks:
        own = sum(
            len({i for b in plan.source.stored(rank, n) for i in indices(b.box)}
                & {i for b in plan.destination.stored(rank, n) for i in indices(b.box)}) * tensor.itemsize
            for n, tensor in plan.destination.tensors.items()
        )  # fmt: skip
        assert plan.bytes_kept(rank) == own
        assert plan.bytes_received(rank) == plan.destination.bytes_stored(rank) - own
    assert sum(map(plan.bytes_sent, plan.ranks)) == sum(map(plan.bytes_received, plan.ranks))


@on_any_machine
@given(pairs())
def test_relays_send_each_element_once_from_the_source_and_once_to_each_rank(pair):
    plan = tp_plans.transfer.plan_transfer(*pair, relay=True)
    direct = [each.direct for each in plan.transfers]
    assert arrived(plan, direct) == arrived(tp_plans.transfer.plan_transfer(*pair))
    left, has = Counter(), set()
    for each in plan.transfers:
        for index in indices(each.box):
            if each.is_relay:  # what a rank passes on has reached it before, in the plan's order
                assert (each.source, each.tensor, index) in has
            elif not each.is_local:
                left[each.tensor, index] += 1
            if not each.is_local:
                has.add((each.destination, each.tensor, index))
    assert set(left.values()) <= {1}
    for rank in plan.ranks:
        assert sum(each.nbytes for each in plan.transfers if each.is_relay and each.source == rank) <= (
            plan.bytes_received(rank)
        )


def test_relays_spare_the_trainer_and_share_the_work_among_replicas():
    tensors = {f"w{i}": CheckpointTensor((64, 48)) for i in range(24)}
    source = tp_plans.transfer.mesh_layout(tensors, (4, 2), {name: [Replicate(), Shard(0)] for name in tensors})
    engines = tp_plans.transfer.mesh_layout(
        tensors, (6, 2), {name: [Replicate(), Shard(1)] for name in tensors}
    ).shifted(8)
    plan, direct = (tp_plans.transfer.plan_transfer(source, engines, relay=relay) for relay in (True, False))
    size = 24 * 64 * 48 * 2
    assert sum(map(plan.bytes_sent, range(8))) == size
    assert sum(map(direct.bytes_sent, range(8))) == 6 * size
    passed_on = [plan.bytes_sent(rank) for rank in range(8, 20)]
    assert sum(passed_on) == 5 * size
    assert max(passed_on) <= size // 2  # no more than a rank receives
    assert min(passed_on) >= 0.7 * max(passed_on)
    assert plan.fingerprint() != direct.fingerprint()


@on_any_machine
@given(pairs())
def test_a_cover_gives_each_element_to_one_rank_that_stores_it(pair):
    cover = tp_plans.transfer.plan_cover(pair[0])
    counts = Counter((each.tensor, index) for each in cover for index in indices(each.box))
    assert counts == Counter((name, i) for name, t in pair[0].tensors.items() for i in indices(full_box(t.shape)))
    assert all(pair[0].within(each.source, each.tensor, each.box) for each in cover)


def test_replicas_share_the_sending():
    tensors = {f"w{i}": CheckpointTensor((64, 16 + 16 * (i % 3))) for i in range(24)}
    source = tp_plans.transfer.mesh_layout(tensors, (4, 2), {name: [Replicate(), Shard(0)] for name in tensors})
    for replicas in (1, 3):
        engine = tp_plans.transfer.mesh_layout(tensors, (replicas,), {name: [Replicate()] for name in tensors}).shifted(
            8
        )
        plan = tp_plans.transfer.plan_transfer(source, engine)
        sent = [plan.bytes_sent(rank) for rank in range(8)]
        assert sum(sent) == replicas * sum(volume(full_box(t.shape)) * 2 for t in tensors.values())
        assert max(sent) - min(sent) <= max(each.nbytes for each in plan.transfers)


def test_one_large_block_is_shared_by_its_replicas_in_parts():
    tensors = {"embedding": CheckpointTensor((4096, 4096))}
    source = tp_plans.transfer.mesh_layout(tensors, (4,), {"embedding": [Replicate()]})
    plan = tp_plans.transfer.plan_transfer(
        source, tp_plans.transfer.mesh_layout(tensors, (1,), {"embedding": [Replicate()]}).shifted(4)
    )
    assert [plan.bytes_sent(rank) for rank in range(4)] == [4096 * 4096 * 2 // 4] * 4


def test_a_rank_that_stores_two_copies_receives_one():
    tensors = {"w": CheckpointTensor((6, 2))}
    source = tp_plans.transfer.mesh_layout(tensors, (2,), {"w": [Shard(0)]})
    copies = [
        StoredBlock(2, ((0, 4), (0, 2)), "a", (0, 0), (0, 1)),
        StoredBlock(2, ((2, 6), (0, 2)), "b", (1, 0), (0, 1)),
    ]
    plan = tp_plans.transfer.plan_transfer(source, tp_plans.transfer.TransferLayout(tensors, {"w": copies}))
    assert plan.bytes_received(2) == 6 * 2 * 2
    targets = [
        (block.local, block.local_box(part)) for part, block in plan.destination.within(2, "w", ((2, 3), (0, 2)))
    ]
    assert targets == [("a", ((2, 3), (0, 2))), ("b", ((1, 2), (0, 2)))]


def test_plan_transfer_refuses_with_the_tensor():
    tensors = {"w": CheckpointTensor((4, 2))}
    full = tp_plans.transfer.mesh_layout(tensors, (1,), {"w": [Replicate()]})
    half = tp_plans.transfer.TransferLayout(tensors, {"w": [StoredBlock(0, ((0, 2), (0, 2)), "w", (0, 0), (0, 1))]})
    with pytest.raises(TransferError, match=r"no source rank stores \(\(2, 4\), \(0, 2\)\) of w"):
        tp_plans.transfer.plan_transfer(half, full)
    with pytest.raises(TransferError, match="lacks 1 of the destination's 1 tensors, first w"):
        tp_plans.transfer.plan_transfer(tp_plans.transfer.TransferLayout({}, {}), full)
    other = tp_plans.transfer.mesh_layout({"w": CheckpointTensor((4, 3))}, (1,), {"w": [Replicate()]})
    with pytest.raises(TransferError, match=r"w is \(4, 2\) in bfloat16 at the source and \(4, 3\)"):
        tp_plans.transfer.plan_transfer(full, other)


def test_layouts_that_describe_nothing_are_refused():
    tensors = {"w": CheckpointTensor((4, 2))}
    with pytest.raises(TransferError, match="dtype 'int4' is unknown"):
        CheckpointTensor((2,), "int4")
    with pytest.raises(TransferError, match="rank 0 cannot store"):
        tp_plans.transfer.TransferLayout(tensors, {"w": [StoredBlock(0, ((0, 5), (0, 2)), "w", (0, 0), (0, 1))]})
    with pytest.raises(TransferError, match="do not map a block"):
        tp_plans.transfer.TransferLayout(tensors, {"w": [StoredBlock(0, ((0, 4), (0, 2)), "w", (0,), (0, None))]})
    with pytest.raises(TransferError, match="none of the layout's 1 tensors"):
        tp_plans.transfer.TransferLayout(tensors, {"v": []})
    with pytest.raises(TransferError, match="2 layouts for a mesh of 1 axes"):
        tp_plans.boxes.mesh_boxes((2,), (2,), [Replicate(), Replicate()])
    with pytest.raises(TransferError, match=r"shard\(2\) is no layout of a tensor of shape \(4, 2\)"):
        tp_plans.boxes.mesh_boxes((4, 2), (2,), [Shard(2)])
    with pytest.raises(TransferError, match="w has no layout"):
        tp_plans.transfer.mesh_layout(tensors, (2,), {})
    with pytest.raises(TransferError, match="3 ranks for a mesh of 2"):
        tp_plans.transfer.mesh_layout(tensors, (2,), {"w": [Shard(0)]}, ranks=[0, 1, 2])
    with pytest.raises(PlanError, match="is not a dim"):
        StridedShard(-1)


def test_a_layout_survives_json_and_other_text_is_refused():
    tensors = {"w": CheckpointTensor((4, 2)), "expert": CheckpointTensor((3, 2), "float32")}
    layout = tp_plans.transfer.mesh_layout(tensors, (2,), {"w": [Shard(0)], "expert": [Replicate()]})
    stacked = tp_plans.transfer.TransferLayout(
        {"expert": tensors["expert"]}, {"expert": [StoredBlock(7, ((0, 3), (0, 2)), "experts", (5, 0, 0), (1, 2))]}
    )
    both = layout.union(stacked)
    assert tp_plans.transfer.TransferLayout.from_json(both.to_json()) == both
    assert both.ranks == (0, 1, 7)
    for wrong in ("", "[]", '{"format": 3}', json.dumps({"format": 2, "tensors": {"w": 3}, "patterns": []})):
        with pytest.raises(TransferError, match=r"not the JSON of a layout|has format 3"):
            tp_plans.transfer.TransferLayout.from_json(wrong)
    with pytest.raises(TransferError, match="in one layout and"):
        layout.union(tp_plans.transfer.mesh_layout({"w": CheckpointTensor((4, 3))}, (1,), {"w": [Replicate()]}))


def test_questions_about_every_rank_read_the_blocks_of_all_ranks_once():
    tensors = {f"layers.{i}.weight": CheckpointTensor((64, 2)) for i in range(4)}
    layout = tp_plans.transfer.mesh_layout(tensors, (32,), {name: [Shard(0)] for name in tensors})
    assert {layout.bytes_stored(rank) for rank in layout.ranks} == {4 * 2 * 2 * 2}
    assert all(set(layout.local_shapes(rank).values()) == {(2, 2)} for rank in layout.ranks)
    assert len({id(layout.pattern(name)) for name in tensors}) == 1


@on_any_machine
@given(pairs(), st.booleans())
def test_a_rank_asks_for_its_own_transfers_and_totals_without_the_list_of_all(pair, relay):
    plan = tp_plans.transfer.plan_transfer(*pair, relay=relay)
    for rank in plan.ranks:
        own = [each for each in plan.transfers if rank in (each.source, each.destination)]
        assert plan.for_rank(rank) == own
        away = [each for each in own if not each.is_local]
        assert plan.bytes_sent(rank) == sum(each.nbytes for each in away if each.source == rank)
        assert plan.bytes_received(rank) == sum(each.nbytes for each in away if each.destination == rank)
        assert plan.bytes_kept(rank) == sum(each.nbytes for each in own if each.is_local)
        straight = [each.direct for each in plan.transfers if rank in (each.direct.source, each.direct.destination)]
        assert Counter(plan.for_rank(rank, direct=True)) == Counter(straight)
    assert plan.receivers == tuple(sorted({each.destination for each in plan.transfers}))
    assert plan.bytes_wanted == sum(each.nbytes for each in plan.transfers if not (each.is_local or each.is_relay))


def _greedy(plan):
    """The most bytes that a rank sends if each part, from large to small, is sent by the rank that has sent least."""
    load = Counter()
    items = []
    for each in plan.transfers:
        if each.is_local:
            continue
        blocks = plan.source.blocks(each.tensor)
        items.append((each.nbytes, sorted({b.rank for b in blocks if intersection(b.box, each.box) == each.box})))
    for nbytes, holders in sorted(items, key=lambda item: (len(item[1]) > 1, -item[0])):
        load[min(holders, key=lambda rank: (load[rank], rank))] += nbytes
    return max(load.values(), default=0)


@pytest.mark.parametrize("layers", [1, 7])
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_senders_are_as_balanced_as_by_a_choice_for_each_part(layers, replicas):
    shapes = {"q": (64, 32), "k": (16, 32), "norm": (32,), "down": (32, 96), "up": (96, 32)}
    tensors = {f"layers.{n}.{name}.weight": CheckpointTensor(s) for n in range(layers) for name, s in shapes.items()}
    kinds = {"norm": (Replicate(),) * 3, "down": (Replicate(), StridedShard(1), Shard(1))}
    split = {name: kinds.get(name.split(".")[2], (Replicate(), StridedShard(0), Shard(0))) for name in tensors}
    source = tp_plans.transfer.mesh_layout(tensors, (2, 2, 2), split)
    expert = {"expert": CheckpointTensor((64, 64))}  # of one rank, which then sends less of all else
    source = source.union(tp_plans.transfer.mesh_layout(expert, (1,), {"expert": [Replicate()]}, ranks=[3]))
    tensors |= expert
    engine = tp_plans.transfer.mesh_layout(tensors, (replicas, 2), {name: [Replicate(), Shard(0)] for name in tensors})
    plan = tp_plans.transfer.plan_transfer(source, engine.shifted(8))
    largest = max(each.nbytes for each in plan.transfers)
    assert max(map(plan.bytes_sent, range(8))) <= _greedy(plan) + largest


def test_repeated_layers_and_experts_cost_little_more_than_one():
    def cuts(layers, experts):
        names = [f"layers.{n}.experts.{e}.up_proj.weight" for n in range(layers) for e in range(experts)]
        tensors = dict.fromkeys(names, CheckpointTensor((64, 8)))
        source = tp_plans.transfer.mesh_layout(tensors, (16,), {name: [Shard(0)] for name in names})
        target = tp_plans.transfer.mesh_layout(tensors, (4,), {name: [Shard(1)] for name in names}).shifted(16)
        plan = tp_plans.transfer.plan_transfer(source, target)
        assert sum(map(plan.bytes_received, range(16, 20))) == len(names) * 64 * 8 * 2
        return [len(kind.parts) for kind in plan._kinds]

    assert cuts(1, 1) == cuts(5, 8) == [16 * 4]
