"""Multi-head latent attention: the projection to the compressed keys and values, and the key that all heads share."""

import pytest
import torch
from torch import nn

from harness.layers import mismatches
from tp_plans import ColwiseParallel, PrepareModuleInput, RowwiseParallel, Shard
from tp_plans.styles import MLAKVProjection, ParallelAttention

HIDDEN, HEADS, NOPE, ROPE, VALUE, LATENT = 12, 4, 3, 2, 5, 7


class LatentAttention(nn.Module):
    def __init__(self, bias=False, rope=ROPE):
        super().__init__()
        self.num_heads, self.qk_rope_head_dim = HEADS, rope
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(HIDDEN, LATENT + rope, bias=bias)
        self.kv_a_layernorm = nn.LayerNorm(LATENT)
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(HEADS * VALUE, HIDDEN, bias=bias)

    def forward(self, hidden_states):
        rope = self.qk_rope_head_dim
        query = self.q_proj(hidden_states).unflatten(-1, (-1, NOPE + rope)).transpose(1, 2)
        compressed, shared = self.kv_a_proj_with_mqa(hidden_states).split([LATENT, rope], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(compressed)).unflatten(-1, (-1, NOPE + VALUE)).transpose(1, 2)
        own, value = expanded.split([NOPE, VALUE], dim=-1)
        key = torch.cat([own, shared.unsqueeze(1).sin().expand(-1, own.shape[1], -1, -1)], dim=-1)
        mixed = (query @ key.mT).softmax(-1) @ value
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


def latent_faults(bias, rotary, sequence_parallel, own=None, rope=ROPE):
    stream = {"output_layouts": Shard(1), "use_local_output": False} if sequence_parallel else {}
    rules = {
        "": own or PrepareModuleInput(),
        "q_proj": ColwiseParallel(multiple_of=NOPE + rope),
        "kv_a_proj_with_mqa": MLAKVProjection(rope_dim=rotary),
        "kv_b_proj": ColwiseParallel(multiple_of=NOPE + VALUE),
        "o_proj": RowwiseParallel(multiple_of=VALUE, **stream),
    }
    how = {"arrives": Shard(1), "plain": False, "leaves": Shard(1), "leaves_plain": False} if sequence_parallel else {}
    whole = torch.randn((2, 5, HIDDEN), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return mismatches(lambda: LatentAttention(bias, rope), rules, whole, **how)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "SP"])
@pytest.mark.parametrize(("bias", "rotary"), [(False, "qk_rope_head_dim"), (True, ROPE)])
def test_latent_attention_of_uneven_width_is_right(two_ranks, bias, rotary, sequence_parallel):
    assert two_ranks.run(latent_faults, bias, rotary, sequence_parallel) == [[], []]


def test_latent_attention_without_positions_is_right(two_ranks):
    assert two_ranks.run(latent_faults, True, "qk_rope_head_dim", False, None, 0) == [[], []]


def test_latent_attention_is_right_with_one_head_a_rank(four_ranks):
    counts = ParallelAttention(head_count_attrs=("num_heads",))
    assert four_ranks.run(latent_faults, True, "qk_rope_head_dim", False, counts) == [[]] * 4
