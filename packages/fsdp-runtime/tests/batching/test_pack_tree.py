"""Prefix trees in rows: shared tokens once, ancestors only, and back to the samples."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_runtime import ModelError, OptionError
from fsdp_runtime.batching import GroupMember, SampleError, pack_tree
from fsdp_runtime.batching.tree_row import prefix_tree
from fsdp_runtime.steps.context.sharding import SequenceLayout

# Few token ids, so that samples share prefixes by chance; some are prefixes of others, some equal.
sample = st.lists(st.integers(0, 2), min_size=1, max_size=8)
group = st.lists(sample, min_size=1, max_size=6)


@given(samples=group)
@settings(max_examples=60, deadline=None)
def test_a_tree_has_each_distinct_prefix_once_and_its_paths_spell_the_samples(samples: list[list[int]]) -> None:
    tree = prefix_tree([torch.tensor(each) for each in samples])
    prefixes = {tuple(each[:length]) for each in samples for length in range(1, len(each) + 1)}
    assert len(tree.token_ids) == len(prefixes)
    for each, path in zip(samples, tree.paths, strict=True):
        assert tree.token_ids[path].tolist() == each
        assert tree.positions[path].tolist() == list(range(len(each)))


@given(groups=st.lists(group, min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_a_token_sees_the_tokens_of_its_own_prefix_and_no_others(groups: list[list[list[int]]]) -> None:
    for row in pack_tree(groups, budget=64, multiple_of=3).rows():
        seen = row.mask()[0, 0]
        expected = torch.eye(len(seen), dtype=torch.bool)  # padding sees itself, so that no row of scores is empty
        for path in row.paths:
            for depth, token in enumerate(path):
                expected[token, path[: depth + 1]] = True
        assert torch.equal(seen, expected)


@given(groups=st.lists(group, min_size=1, max_size=4), ranks=st.integers(1, 3), budget=st.integers(8, 20))
@settings(max_examples=30, deadline=None)
def test_values_of_scored_tokens_come_back_to_every_sample(
    groups: list[list[list[int]]], ranks: int, budget: int
) -> None:
    masks = [[[i % 2 for i in range(len(each))] for each in samples] for samples in groups]
    packing = pack_tree(groups, budget=budget, ranks=ranks, loss_masks=masks)
    found: dict[Any, torch.Tensor] = {}
    for rank in range(ranks):
        rows = packing.rows(rank)
        assert len(rows) == packing.micro_batches
        assert all(0 < row.input_ids.shape[1] <= budget for row in rows)
        # A value that names both the token and its predecessor.
        found |= packing.unpack([row.targets * 10 + row.input_ids[0, row.predictors] for row in rows], rank)
    assert set(found) == {(g, i) for g, samples in enumerate(groups) for i in range(len(samples))}
    for (g, i), values in found.items():
        ids, mask = groups[g][i], masks[g][i]
        expected = [10 * ids[t + 1] + ids[t] if mask[t + 1] else 0 for t in range(len(ids) - 1)]
        assert values.tolist() == [*expected, 0]


def test_a_prompt_with_responses_takes_its_tokens_once() -> None:
    prompt = list(range(100, 150))
    (row,) = pack_tree([[[*prompt, *range(g * 10, g * 10 + 8)] for g in range(4)]], budget=1000, multiple_of=1).rows()
    assert len(row.targets) == 50 - 1 + 4 * 8
    assert int((row.subtree_end[0] == 50 + 4 * 8).sum()) >= 50


def test_without_the_prompts_loss_only_responses_are_predicted() -> None:
    groups, masks = [[[1, 2, 3, 4], [1, 2, 5]]], [[[0, 0, 1, 1], [0, 0, 1]]]
    (row,) = pack_tree(groups, budget=8, loss_masks=masks).rows()
    assert row.input_ids[0, row.predictors].tolist() == [2, 3, 2]
    assert row.targets.tolist() == [3, 4, 5]


def test_a_tree_beyond_a_row_is_divided_and_its_parts_repeat_the_prefix() -> None:
    prompt = [9, 9, 9, 9]
    packing = pack_tree([[[*prompt, i, i] for i in range(4)]], budget=8)
    assert packing.micro_batches == 2
    for row in packing.rows():
        assert row.input_ids[0, :4].tolist() == prompt
        assert len(row.samples) == 2


def test_a_further_mask_compares_positions_on_the_path() -> None:
    (row,) = pack_tree([[[1, 2, 3, 4], [1, 2, 5, 6]]], budget=8).rows()
    window = row.mask(lambda batch, head, query, key: key > query - 2)[0, 0]
    assert row.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert window[4].tolist() == [False, True, False, False, True, False]  # 5 sees 2, which is three tokens before it


def test_selected_values_get_the_gradients_of_all_branches() -> None:
    (row,) = pack_tree([[[1, 2, 3], [1, 2, 4], [1, 2, 5]]], budget=8).rows()
    hidden = torch.zeros(*row.input_ids.shape, 3, requires_grad=True)
    row.select(hidden).sum().backward()
    assert hidden.grad[0, :, 0].tolist() == [1, 3, 0, 0, 0]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("load_balancer", ["headtail", None])
def test_shards_have_every_target_once(ranks: int, load_balancer: Any) -> None:
    (row,) = pack_tree([[[1, 2, 3, 4, 5], [1, 2, 6, 7], [8]]], budget=8, cp=ranks).rows()
    shards = [row.shard(SequenceLayout(row.input_ids.shape[1], ranks, rank, load_balancer)) for rank in range(ranks)]
    slots = torch.cat([shard.slots for shard in shards if shard.slots is not None])
    real = torch.cat([shard.targets for shard in shards]) != -100
    assert sorted(slots[real].tolist()) == list(range(len(row.targets)))
    for shard in shards:
        assert shard.slots is not None
        for predictor, target, slot in zip(shard.predictors, shard.targets, shard.slots, strict=True):
            if slot < len(row.targets):
                assert target == row.targets[slot]
                assert shard.input_ids[0, predictor] == row.input_ids[0, row.predictors[slot]]


def test_a_row_that_scores_nothing_keeps_one_entry() -> None:
    (row,) = pack_tree([[[1, 2]]], budget=4, loss_masks=[[[0, 0]]]).rows()
    assert row.targets.tolist() == [-100]
    assert row.unpack(torch.tensor([5.0]))[GroupMember(0, 0)].tolist() == [0.0, 0.0]


def test_a_model_that_would_ignore_the_branches_is_refused() -> None:
    (row,) = pack_tree([[[1, 2]]], budget=4).rows()
    with pytest.raises(ModelError, match=r"steps=\(SharedPrefixes\(\),\)"):
        row.inputs(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"groups": [[[1] * 9]], "budget": 8}, SampleError, "the longest is sample 0 of group 0 with 9"),
        ({"groups": [], "budget": 8}, SampleError, "no groups"),
        ({"groups": [[]], "budget": 8}, SampleError, "no samples of group 0"),
        ({"groups": [[[1]]], "budget": 8, "loss_masks": []}, SampleError, "1 groups and 0 groups of loss masks"),
        ({"groups": [[[1]]], "budget": 8, "cp": 0}, OptionError, "cp=0"),
        ({"groups": [[[1]]], "budget": 8, "pair_cost": -1.0}, OptionError, "pair_cost=-1.0"),
    ],
    ids=str,
)
def test_what_cannot_be_packed_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        pack_tree(**arguments)


def test_values_of_another_number_are_refused() -> None:
    (row,) = pack_tree([[[1, 2, 3]]], budget=4).rows()
    with pytest.raises(SampleError, match="for 2 targets"):
        row.unpack(torch.zeros(3))
    with pytest.raises(SampleError, match="for a row of"):
        row.select(torch.zeros(1, 9, 2))
    (row,) = pack_tree([[[1, 2, 3]]], budget=4, multiple_of=4).rows()
    shard = row.shard(SequenceLayout(4, 2, 0))
    with pytest.raises(SampleError, match="group of cp"):
        shard.unpack(torch.zeros(len(shard.targets)))
