"""Layers whose weight is several matrices one after another, and heads that ranks share."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut

from harness.layers import mismatches, parallelized
from harness.ranks import RanksFailed
from tp_plans import ColwiseParallel, PrepareModuleInput, RowwiseParallel, Shard
from tp_plans.styles import ParallelAttention

HIDDEN, HEADS, HEAD_DIM, INNER = 12, 8, 4, 27


def activation(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Attention(nn.Module):
    """Grouped queries, keys and values in three layers or one; reads its counts from itself or its config."""

    def __init__(self, kv_heads, *, fused, bias=True):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=kv_heads, other="kept")
        self.head_dim, self.num_heads = HEAD_DIM, HEADS
        self.num_key_value_groups = HEADS // kv_heads
        if fused:
            self.qkv_proj = nn.Linear(HIDDEN, (HEADS + 2 * kv_heads) * HEAD_DIM, bias=bias)
        else:
            self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=bias)
            self.k_proj, self.v_proj = (nn.Linear(HIDDEN, kv_heads * HEAD_DIM, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=bias)

    def forward(self, hidden_states):
        heads, kv_heads = self.num_heads, self.config.num_key_value_heads
        if hasattr(self, "qkv_proj"):
            sizes = [heads * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM]
            parts = self.qkv_proj(hidden_states).split(sizes, dim=-1)
        else:
            parts = [layer(hidden_states) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in parts)
        key, value = (states.repeat_interleave(self.num_key_value_groups, dim=1) for states in (key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


def attention_rules(*, fused):
    counts = ParallelAttention(
        head_count_attrs=("num_heads", "config.num_key_value_heads", "config.num_attention_heads")
    )
    heads = ("config.num_attention_heads", "config.num_key_value_heads", "config.num_key_value_heads")
    if fused:
        columns = {"qkv_proj": ColwiseParallel(multiple_of="head_dim", fused_sizes=heads, replicate_kv_heads=True)}
    else:
        keys_values = ColwiseParallel(multiple_of="head_dim", replicate_kv_heads=True)
        columns = {"q_proj": ColwiseParallel(multiple_of="head_dim"), "k_proj": keys_values, "v_proj": keys_values}
    return {"": counts, **columns, "o_proj": RowwiseParallel(multiple_of="head_dim")}


def attention_faults(kv_heads, fused, bias):
    return mismatches(
        lambda: Attention(kv_heads, fused=fused, bias=bias), attention_rules(fused=fused), activation(2, 5, HIDDEN)
    )


FUSED = pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])


@FUSED
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_key_value_heads_as_many_or_fewer_than_ranks_are_right(four_ranks, kv_heads, fused):
    assert four_ranks.run(attention_faults, kv_heads, fused, kv_heads == 2) == [[]] * 4


@FUSED
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_two_ranks_share_a_head_or_have_one_each(two_ranks, kv_heads, fused):
    assert two_ranks.run(attention_faults, kv_heads, fused, True) == [[]] * 2


def counts_after(kv_heads):
    whole = Attention(kv_heads, fused=True)
    own = parallelized(whole, attention_rules(fused=True))
    config = own.config
    return own.num_heads, config.num_key_value_heads, own.num_key_value_groups, config.other, vars(whole.config)


@pytest.mark.parametrize(("kv_heads", "own"), [(1, (2, 1, 2)), (2, (2, 1, 2)), (4, (2, 1, 2)), (8, (2, 2, 1))])
def test_the_layer_sees_its_own_counts_and_others_the_whole_ones(four_ranks, kv_heads, own):
    whole = {"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "other": "kept"}
    assert four_ranks.run(counts_after, kv_heads) == [(*own, "kept", whole)] * 4


def stored():
    weight = parallelized(Attention(2, fused=True), attention_rules(fused=True)).qkv_proj.weight
    return isinstance(weight, DTensor), weight.placements == (Cut(0),), list(weight.to_local().shape)


def test_a_fused_weight_is_stored_as_an_ordinary_shard_in_its_own_order(four_ranks):
    assert four_ranks.run(stored) == [(True, True, [12, HIDDEN])] * 4


class GatedMLP(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(HIDDEN, 2 * INNER, bias=bias), nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


def gated_faults(length, bias, sequence_parallel):
    stream = {"output_layouts": Shard(1), "use_local_output": False} if sequence_parallel else {}
    rules = {
        "": PrepareModuleInput(),
        "gate_up_proj": ColwiseParallel(fused_sizes=(1, 1)),
        "down_proj": RowwiseParallel(**stream),
    }
    how = {"arrives": Shard(1), "plain": False, "leaves": Shard(1), "leaves_plain": False} if sequence_parallel else {}
    return mismatches(lambda: GatedMLP(bias), rules, activation(2, length, HIDDEN), **how)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "SP"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("length", [1, 5])
def test_gate_and_up_in_one_weight_of_uneven_width_are_right(two_ranks, length, bias, sequence_parallel):
    assert two_ranks.run(gated_faults, length, bias, sequence_parallel) == [[], []]


class Packed(nn.Module):
    """A row-wise layer whose input is two vectors of which each rank has its part."""

    def __init__(self, narrow):
        super().__init__()
        self.narrow = narrow
        self.left, self.right = nn.Linear(HIDDEN, narrow), nn.Linear(HIDDEN, 2 * narrow)
        self.down = nn.Linear(3 * narrow, HIDDEN)

    def forward(self, hidden_states):
        return self.down(torch.cat([self.left(hidden_states).tanh(), self.right(hidden_states).sin()], dim=-1))


def packed_faults(narrow, pieces):
    down = RowwiseParallel(fused_sizes=pieces)
    rules = {"left": ColwiseParallel(), "right": ColwiseParallel(), "down": down}
    return mismatches(lambda: Packed(narrow), rules, activation(2, 5, HIDDEN))


@pytest.mark.parametrize("narrow", [8, 9])
@pytest.mark.parametrize("pieces", [(1, 2), ("narrow", 18)])
def test_an_input_of_several_pieces_meets_its_own_columns(two_ranks, narrow, pieces):
    pieces = tuple(2 * narrow if piece == 18 else piece for piece in pieces)
    assert two_ranks.run(packed_faults, narrow, pieces) == [[], []]


def single_faults():
    style = ColwiseParallel(fused_sizes=(1, 1))
    reference = nn.Linear(HIDDEN, 8).double()
    own = parallelized(reference, {"": style})(activation(3, HIDDEN))
    rank = torch.distributed.get_rank()
    whole = reference(activation(3, HIDDEN))
    wanted = torch.cat([whole[:, 2 * rank : 2 * rank + 2], whole[:, 4 + 2 * rank : 6 + 2 * rank]], dim=-1)
    return bool((own - wanted).abs().max() < 1e-12)


def seeded_single():
    torch.manual_seed(0)
    return single_faults()


def test_a_model_that_is_one_fused_layer_is_split_when_its_numbers_are_given(two_ranks):
    assert two_ranks.run(seeded_single) == [True, True]


def undealt():
    parallelized(Attention(4, fused=False), attention_rules(fused=False) | {"": ParallelAttention()})
    module = nn.ModuleDict({"k": nn.Linear(HIDDEN, 6)})
    parallelized(module, {"k": ColwiseParallel(multiple_of=2, fused_sizes=(1, 2))})["k"](torch.ones(2, HIDDEN))


def test_units_that_cannot_be_dealt_are_refused_with_the_legal_numbers(two_ranks):
    with pytest.raises(RanksFailed, match=r"PlanError: 1 blocks of 2 features cannot be split over tp=2: use a tp out"):
        two_ranks.run(undealt)


def unnamed():
    parallelized(Attention(4, fused=True), {"qkv_proj": ColwiseParallel(fused_sizes=("n_heads", 1, 1))})


def test_a_number_that_the_parent_lacks_is_refused_when_the_plan_is_applied(two_ranks):
    with pytest.raises(RanksFailed, match=r"PlanError: Attention has no positive integer 'n_heads'"):
        two_ranks.run(unnamed)
