"""What each way of attention sends, computes and refuses; its numbers are tested on ranks with the models."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fsdp_runtime.steps.context.masks as masks
from coverage.table import entries
from coverage.table import tiny_model as tiny_row
from fsdp_runtime import LayoutError, MeshSpec, ModelError, OptionError
from fsdp_runtime.dry_run.trace.fake_world import fake_world
from fsdp_runtime.setup import ModelFacts
from fsdp_runtime.steps import ContextAttention
from fsdp_runtime.steps.context.attention import kv_copies
from fsdp_runtime.steps.context.masks import SequenceMask
from fsdp_runtime.steps.context.methods import Method
from fsdp_runtime.steps.context.ring import Parts
from fsdp_runtime.steps.context.sharding import SequenceLayout
from fsdp_runtime.steps.context.step import check_context_parallel, check_heads_over_cp
from harness.collectives import RecordCollectives
from harness.models import tiny_model

HEADS, KV_HEADS, DIM, TOKENS = 8, 2, 16, 32


def _sent(way: Method, ranks: int) -> Counter[tuple[str, int]]:
    """The collectives of one layer, forward and backward, by kind and bytes of this rank's input."""
    with fake_world(MeshSpec(cp=ranks), rank=0) as mesh:
        shapes = ((HEADS, TOKENS, DIM), (KV_HEADS, TOKENS, DIM), (KV_HEADS, TOKENS, DIM))
        parts = [torch.zeros(1, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        attention = ContextAttention(mesh.get_group("cp"), "headtail", way)
        with RecordCollectives() as record:
            attention.attend(nn.Identity(), *parts, attention_mask=None)[0].sum().backward()
    return Counter((call.kind, call.nbytes) for call in record.calls)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_and_collectives_of_a_layer_are_those_of_the_closed_forms(ranks: int) -> None:
    keys_and_values = 2 * TOKENS * KV_HEADS * DIM * 2  # in bfloat16
    queries = TOKENS * HEADS * DIM * 2
    copied = keys_and_values * kv_copies(KV_HEADS, ranks)
    assert _sent("allgather", ranks) == {
        ("all_gather", keys_and_values): 1,
        ("reduce_scatter", ranks * keys_and_values): 1,
    }
    # Heads for sequence, and back, in forward and in backward.
    assert _sent("ulysses", ranks) == {("all_to_all", queries + copied): 2, ("all_to_all", queries): 2}
    # Keys and values in forward and in backward; their gradients in float32.
    assert _sent("ring", ranks) == {
        ("send", keys_and_values): 2 * (ranks - 1),
        ("send", 2 * keys_and_values): ranks - 1,
    }


@pytest.mark.parametrize(("heads", "ranks", "copies"), [(8, 4, 1), (2, 4, 2), (1, 4, 4), (3, 2, 2), (4, 6, 3)])
def test_key_value_heads_are_copied_as_often_as_needed(heads: int, ranks: int, copies: int) -> None:
    assert kv_copies(heads, ranks) == copies


def _window(size: int, queries: Tensor, keys: Tensor) -> Tensor:
    distance = queries[:, None] - keys[None, :]
    return ((distance >= 0) & (distance < size))[None, None]


@pytest.mark.parametrize("load_balancer", ["headtail", None])
def test_a_ring_computes_only_tiles_that_some_query_sees(monkeypatch: pytest.MonkeyPatch, load_balancer: str) -> None:
    monkeypatch.setattr(masks, "TILE", 4)
    window, length, ranks = 6, 64, 4
    pairs = 0
    for rank in range(ranks):
        layout = SequenceLayout(length, ranks, rank, load_balancer)
        mask = SequenceMask(partial(_window, window), layout, torch.device("cpu"))
        parts = Parts(layout, mask, causal=True, fused=False)
        for owner in range(ranks):
            own, others = layout.positions, SequenceLayout(length, ranks, owner, load_balancer).positions
            for block in parts.of(owner):
                seen = _window(window, own[block.queries], others[block.keys])
                assert seen.any()
                assert torch.equal(seen, seen.new_ones(seen.shape) if block.mask is None else block.mask)
                pairs += int(seen.sum())
    places = torch.arange(length)
    assert pairs == int(_window(window, places, places).sum())


def test_a_mask_is_cut_to_all_its_queries_only() -> None:
    mask = SequenceMask(partial(_window, 2), SequenceLayout(8, 2, 0), torch.device("cpu"))
    assert mask[:, :, -0:, :] is mask
    with pytest.raises(LayoutError, match="leave logits_to_keep out, or pass 0"):
        mask[:, :, -1:, :]


@pytest.mark.parametrize("fused", [True, False])
def test_a_ring_without_a_mask_computes_every_pair_once(fused: bool) -> None:
    length, ranks = 48, 3
    found = torch.zeros(length, length, dtype=torch.int64)
    for rank in range(ranks):
        layout = SequenceLayout(length, ranks, rank)
        for owner in range(ranks):
            own, others = layout.positions, SequenceLayout(length, ranks, owner).positions
            for block in Parts(layout, None, causal=True, fused=fused).of(owner):
                ones = torch.ones(len(own[block.queries]), len(others[block.keys]), dtype=torch.int64)
                found[own[block.queries][:, None], others[block.keys][None]] += ones.tril() if block.causal else ones
    assert torch.equal(found, torch.ones_like(found).tril())


def test_an_unknown_way_is_refused_with_those_that_exist() -> None:
    group = MeshSpec().build(device_type="cpu").get_group("cp")
    with pytest.raises(OptionError, match="context_parallel='p2p': write one of 'allgather', 'ulysses', 'ring'"):
        ContextAttention(group, "headtail", "p2p")  # type: ignore[arg-type]


def test_a_ring_refuses_attention_by_a_models_own_function() -> None:
    model = tiny_row(entries()["granite_swa"])  # sinks
    with pytest.raises(ModelError, match=r"has a function of its own.*give 'ulysses' or 'allgather'"):
        check_context_parallel(ModelFacts.of(model), "ring")
    check_context_parallel(ModelFacts.of(model), "ulysses")


def test_a_ring_refuses_dropout() -> None:
    model = tiny_model("LlamaForCausalLM", attention_dropout=0.1)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn has attention_dropout=0\.1: give 'ulysses'"):
        check_context_parallel(ModelFacts.of(model), "ring")


def test_heads_that_do_not_divide_are_refused_with_the_numbers() -> None:
    model = tiny_model("LlamaForCausalLM")
    facts = ModelFacts.of(model)
    heads = model.config.num_attention_heads
    check_heads_over_cp(facts, None, cp=heads, tp=1)
    with pytest.raises(ModelError, match=rf"divides heads over cp=3, and .* has {heads} query heads on a rank: choose"):
        check_heads_over_cp(facts, None, cp=3, tp=1)
    with pytest.raises(ModelError, match=rf"has {heads // 2} query heads on a rank, {heads} over tp=2"):
        check_heads_over_cp(facts, "any", cp=heads, tp=2)
