"""Attention in runs of queries against attention under the mask of the full row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fsdp_runtime._transformers_compat import prefix_attention
from fsdp_runtime._transformers_compat.prefix_attention import attend_in_runs, query_runs, remember_runs
from fsdp_runtime.batching import TreeRow, pack_tree

HEADS, KEY_HEADS, HEAD_DIM = 6, 2, 8


def _row(seed: int, padding: int = 0) -> TreeRow:
    """A row of three random trees of few tokens, whose samples share prefixes of many lengths."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for _ in range(3):
        first = torch.randint(0, 2, (14,), generator=generator)
        cuts = torch.randint(0, 14, (5,), generator=generator).tolist()
        groups.append([torch.cat([first[:cut], torch.randint(0, 2, (6,), generator=generator)]) for cut in cuts])
    (row,) = pack_tree(groups, budget=400, multiple_of=8 if padding else 1).rows()
    return row


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """Transformers' function for "sdpa", in short."""
    causal = bool(options.get("is_causal")) and mask is None
    output = scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=True)
    return output.transpose(1, 2), None


@pytest.fixture(params=[0, 40], ids=["every run apart", "short runs together"])
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(prefix_attention, "_CALL", request.param)
    monkeypatch.setattr(prefix_attention, "_LONGEST", 5)
    return int(request.param)


@pytest.mark.parametrize("seed", range(5))
def test_runs_cover_every_query_once_and_every_key_that_it_sees(seed: int, call: int) -> None:
    row = _row(seed, padding=1)
    mask = row.mask()[0, 0]
    runs = query_runs(row.subtree_end[0])
    assert [run.start for run in runs[1:]] == [run.stop for run in runs[:-1]]
    assert (runs[0].start, runs[-1].stop) == (0, len(mask))
    scores = 0
    for run in runs:
        keys = torch.cat([torch.arange(*span) for span in run.keys])
        unseen = torch.ones(len(mask), dtype=torch.bool).index_fill(0, keys, False)
        assert not mask[run.start : run.stop, unseen].any()
        assert not run.is_root or torch.equal(
            mask[run.start : run.stop, keys], torch.ones(len(keys), len(keys)).bool().tril()
        )
        scores += (run.stop - run.start) * len(keys)
    assert scores < mask.numel() / (4 if call == 0 else 2)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_in_runs_and_its_gradients_are_those_under_the_mask(window: int | None, call: int) -> None:
    row = _row(1)
    mask = row.mask(None if window is None else lambda b, h, query, key: query - key < window)
    length = row.input_ids.shape[1]
    generator = torch.Generator().manual_seed(2)
    inputs = [
        torch.randn(1, heads, length, HEAD_DIM, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    weights = torch.randn(1, length, HEADS, HEAD_DIM, dtype=torch.float64, generator=generator)

    def gradients(output: Tensor) -> list[Tensor]:
        return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]

    expected = gradients(_attend(nn.Identity(), *inputs, mask)[0])
    remember_runs(mask, query_runs(row.subtree_end[0]), causal=window is None)
    found = gradients(attend_in_runs(_attend, nn.Identity(), *inputs, mask)[0])
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-13
    with torch.no_grad():
        assert (attend_in_runs(_attend, nn.Identity(), *inputs, mask)[0] - expected[0]).abs().max() < 1e-13


def test_no_copy_of_the_keys_is_kept_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_attention, "_CALL", 0)
    prompt = torch.arange(100)
    (row,) = pack_tree([[torch.cat([prompt, torch.tensor([200 + i])]) for i in range(50)]], budget=200).rows()
    mask = row.mask()
    remember_runs(mask, query_runs(row.subtree_end[0]), causal=True)
    inputs = [torch.randn(1, heads, 150, HEAD_DIM, requires_grad=True) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    kept: set[int] = set()
    sizes = []

    def keep(saved: Tensor) -> Tensor:
        if saved.untyped_storage().data_ptr() not in kept:
            kept.add(saved.untyped_storage().data_ptr())
            sizes.append(saved.untyped_storage().nbytes())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        attend_in_runs(_attend, nn.Identity(), *inputs, mask)
    assert sum(sizes) < 4 * sum(each.nbytes for each in inputs) + mask.nbytes
