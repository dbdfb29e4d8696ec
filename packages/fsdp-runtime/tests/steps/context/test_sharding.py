"""The layout of a split sequence: every token once, chunks from both ends, cutting undone by the permutation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_runtime import LayoutError, MeshSpec, OptionError, sequence_layout
from fsdp_runtime.steps.context.sharding import SequenceLayout

LOAD_BALANCERS = st.sampled_from(["headtail", None])


@given(ranks=st.integers(1, 8), run=st.integers(1, 5), load_balancer=LOAD_BALANCERS)
def test_every_token_has_one_rank_and_the_permutation_lists_them(ranks: int, run: int, load_balancer: Any) -> None:
    length = 2 * ranks * run
    layouts = [SequenceLayout(length, ranks, rank, load_balancer) for rank in range(ranks)]
    assert torch.equal(torch.cat([layout.positions for layout in layouts]), layouts[0].permutation)
    assert sorted(layouts[0].permutation.tolist()) == list(range(length))


@given(ranks=st.integers(1, 8), run=st.integers(1, 5))
def test_headtail_ranks_have_the_same_causal_work(ranks: int, run: int) -> None:
    works = {int((SequenceLayout(2 * ranks * run, ranks, rank).positions + 1).sum()) for rank in range(ranks)}
    assert len(works) == 1


def test_without_a_load_balancer_each_rank_has_one_contiguous_chunk() -> None:
    assert SequenceLayout(8, 4, 2, None).positions.tolist() == [4, 5]
    assert SequenceLayout(8, 2, 1).positions.tolist() == [2, 3, 4, 5]


def test_a_batch_is_cut_along_its_tokens_and_gets_position_ids() -> None:
    layout = SequenceLayout(4, 2, 0)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "inputs_embeds": torch.arange(8).view(1, 4, 2)}
    local = layout.shard_batch(batch)
    assert local["input_ids"].tolist() == [[5, 8]]
    assert local["inputs_embeds"].tolist() == [[[0, 1], [6, 7]]]
    assert local["position_ids"].tolist() == [[0, 3]]
    three = layout.shard_batch({"position_ids": torch.arange(12).view(3, 1, 4)})
    assert three["position_ids"].tolist() == [[[0, 3]], [[4, 7]], [[8, 11]]]


def test_a_length_that_does_not_divide_is_refused_with_the_one_to_pad_to() -> None:
    with pytest.raises(LayoutError, match=r"10 tokens are not divisible over cp=4 with .*: pad to 16, a multiple of 8"):
        SequenceLayout(10, 4, 0)
    with pytest.raises(LayoutError, match=r"got \(.*\): give one entry for each of the \d+ tokens on dim 1"):
        SequenceLayout(4, 2, 0).shard(torch.zeros(1, 3))
    with pytest.raises(OptionError, match="load_balancer='zigzag': write one of 'headtail', None"):
        SequenceLayout(4, 2, 0, "zigzag")  # type: ignore[arg-type]


def test_layout_first_used_in_inference_mode_cuts_tensors_with_gradients() -> None:
    layout, full = SequenceLayout(4, 2, 0), torch.zeros(1, 4, 2, requires_grad=True)
    with torch.inference_mode():
        layout.shard(full)
    layout.shard(full).sum().backward()
    assert full.grad is not None
    assert full.grad[0, :, 0].tolist() == [1, 0, 0, 1]


def test_without_cp_every_length_stays_whole() -> None:
    layout = sequence_layout(MeshSpec().build(device_type="cpu"), 7)
    assert layout.positions.tolist() == list(range(7))
    assert layout.shard(torch.arange(7).view(1, 7)).tolist() == [list(range(7))]


def test_a_batch_with_values_per_sample_is_refused_by_name() -> None:
    layout = SequenceLayout(8, 2, 0)
    with pytest.raises(LayoutError, match=r"advantages is \(4,\): give one entry for each of the 8 tokens"):
        layout.shard_batch({"input_ids": torch.zeros(4, 8), "advantages": torch.zeros(4)})
    with pytest.raises(LayoutError, match=r"pixel_values is \(4, 3, 6, 6\): give one entry for each of the 8 tokens"):
        layout.shard_batch({"input_ids": torch.zeros(4, 8), "pixel_values": torch.zeros(4, 3, 6, 6)})
    with pytest.raises(LayoutError, match="ids is a list: give one entry"):
        layout.shard_batch({"ids": [[1, 2]]})  # type: ignore[dict-item]
    with pytest.raises(LayoutError, match=r"got \(8,\): give one entry"):
        layout.shard(torch.zeros(8))


@pytest.mark.parametrize("numbers", [(0, 2, 0), (-8, 2, 0), (8.0, 2, 0), (8, 0, 0), (8, 2, 2), (8, 2, -1)])
def test_lengths_and_ranks_out_of_range_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError, match="give"):
        SequenceLayout(*numbers)
