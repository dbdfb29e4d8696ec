"""Fused, shared, bare and expert parameters under FSDP2, under the compiler, copied, and changed in place."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from harness.layers import gradient_mismatches, mismatches, parallelized
from harness.models import jitter
from tp_plans import (
    ColwiseParallel,
    ExpertsParallel,
    ParameterStyle,
    Plan,
    Replicate,
    RowwiseParallel,
    VocabParallelEmbedding,
)
from tp_plans.styles import ColwiseEmbedding, GatheredParameters, ParallelAttention

HIDDEN, HEAD, HEADS, INNER, EXPERTS = 8, 2, 4, 6, 4


class Attention(nn.Module):
    """Four query heads on one key/value head, in one weight, and a factor for each head."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_key_value_heads=1)
        self.num_heads, self.head_dim, self.num_key_value_groups = HEADS, HEAD, HEADS
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2) * HEAD)
        self.factor = nn.Parameter(torch.ones(HEADS))
        self.o = nn.Linear(HEADS * HEAD, HIDDEN)

    def forward(self, hidden):
        query, key, value = self.qkv(hidden).split([self.num_heads * HEAD, HEAD, HEAD], dim=-1)
        query = query.unflatten(-1, (-1, HEAD)).transpose(1, 2)
        key, value = (states.unsqueeze(1).expand(-1, self.num_key_value_groups, -1, -1) for states in (key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o((mixed.transpose(1, 2) * self.factor.unsqueeze(-1)).flatten(-2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)
        self.scale = nn.Parameter(torch.randn(6, HIDDEN))

    def forward(self, hidden):
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(gate.sigmoid() * up) * self.scale.mean(0)


class Experts(nn.Module):
    """Runs every route."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))

    def forward(self, tokens, index, weights):
        hidden = torch.einsum("th,tkih->tki", tokens, self.up[index]).tanh()
        return (torch.einsum("tki,tkhi->tkh", hidden, self.down[index]) * weights.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), Experts()

    def forward(self, hidden):
        tokens = hidden.flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(2, dim=-1)
        return self.experts(tokens, index, weights).view_as(hidden)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp, self.moe = Attention(), MLP(), Mixture()

    def forward(self, hidden):
        hidden = hidden + self.attn(hidden)
        hidden = hidden + self.mlp(hidden)
        return hidden + self.moe(hidden)


RULES = {
    "*.attn": ParallelAttention(layout=None, head_count_attrs=("num_heads",)),
    "*.attn.qkv": ColwiseParallel(multiple_of="head_dim", fused_sizes=("num_heads", 1, 1), replicate_kv_heads=True),
    "*.attn.factor": ParameterStyle(),
    "*.attn.o": RowwiseParallel(multiple_of="head_dim"),
    "*.mlp.gate_up": ColwiseParallel(fused_sizes=(1, 1)),
    "*.mlp.down": RowwiseParallel(),
    "*.mlp.scale": ParameterStyle(gathered=True),
    "*.moe.experts": ExpertsParallel(skips_sentinel_index=False),
    "*.moe": GatheredParameters(names=("router.weight",)),
}


def blocks(number=2):
    torch.manual_seed(0)
    made = nn.Sequential(*(Block() for _ in range(number))).double()
    jitter(made)
    return made


def batch(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def fsdp_faults():
    """Each pair of tp ranks sees its own part of the batch; FSDP averages over the pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = blocks()
    candidate = parallelize_module(copy.deepcopy(reference), mesh["tp"], Plan(RULES).to_torch())
    for block in candidate:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(candidate, mesh=mesh["dp"])
    whole, rank = batch(4, 5, HIDDEN), mesh.get_local_rank("dp")
    expected = reference(whole)
    (expected.square().sum() / 2).backward()
    output = candidate(whole[2 * rank : 2 * rank + 2])
    output.square().sum().backward()
    off = (output - expected[2 * rank : 2 * rank + 2]).abs().max().item()
    names = [name for name, parameter in candidate.named_parameters() if not isinstance(parameter, DTensor)]
    return off < 1e-12, list(gradient_mismatches(reference, candidate)), names


def test_fsdp_on_top_shards_and_trains_every_kind_of_parameter(four_ranks):
    assert four_ranks.run(fsdp_faults) == [(True, [], [])] * 4


def compiled_faults(number, backend):
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    reference = blocks(number)
    candidate = parallelized(reference, RULES)
    for block in candidate:
        block.compile(backend=backend, fullgraph=True)
    outputs = []
    for module in (reference, candidate):
        output = module(batch(2, 5, HIDDEN).requires_grad_())  # as what every block but the first is given
        output.square().sum().backward()
        outputs.append(output.detach())
    off = (outputs[0] - outputs[1]).abs().max().item()
    return off < 1e-10, list(gradient_mismatches(reference, candidate, bound=1e-10)), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_blocks_of_every_kind_share_one_full_graph_and_are_right(two_ranks, backend):
    assert two_ranks.run(compiled_faults, 2, backend) == [(True, [], 1)] * 2


def copied_faults():
    reference = blocks(1)
    original = parallelized(reference, RULES)
    copied = copy.deepcopy(original)
    with torch.no_grad():
        for module in (reference, copied):
            for parameter in module.parameters():
                parameter.mul_(1.25)
    off = (copied(batch(2, 5, HIDDEN)) - reference(batch(2, 5, HIDDEN))).abs().max().item()
    for module in (reference, copied):
        module(batch(2, 5, HIDDEN)).square().sum().backward()
    touched = [name for name, parameter in original.named_parameters() if parameter.grad is not None]
    own = copied[0].attn.num_heads, copied[0].attn.num_key_value_groups
    return off < 1e-12, list(gradient_mismatches(reference, copied)), touched, own


def test_a_copy_computes_and_trains_by_itself_and_keeps_its_counts(two_ranks):
    assert two_ranks.run(copied_faults) == [(True, [], [], (2, 2))] * 2


class InPlace(nn.Module):
    """Changes in place what a layer gives, as Llama 4 adds its experts to the shared one's output."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, hidden):
        if self.kind == "columns":
            inner = self.up(hidden)
            inner.mul_(2)
            return self.down(inner)
        inner = self.up(hidden)
        if self.kind == "gathered":
            inner.add_(1)
        out = self.down(inner.sin())
        out.add_(hidden.cos()).mul_(3)
        return out


def in_place_faults(kind):
    rules = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "gathered":
        rules = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
    return mismatches(lambda: InPlace(kind), rules, batch(2, 5, HIDDEN))


@pytest.mark.parametrize("kind", ["columns", "rows", "gathered"])
def test_a_plain_output_may_be_changed_in_place(two_ranks, kind):
    assert two_ranks.run(in_place_faults, kind) == [[], []]


class Embedded(nn.Module):
    """A table whose output is changed in place, and which is the head's weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN, padding_idx=2)
        self.head = nn.Linear(HIDDEN, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.embed(ids)
        hidden.mul_(3)
        return self.head(hidden.sin())


TIED = {
    "vocabulary": {"embed": VocabParallelEmbedding(), "head": ColwiseParallel(output_layouts=Replicate())},
    "features": {"embed": ColwiseEmbedding(), "head": RowwiseParallel(input_layouts=Replicate())},
}


def tied_faults(kind):
    return mismatches(Embedded, TIED[kind], torch.tensor([[0, 2, 10, 5], [7, 7, 1, 2]]))


@pytest.mark.parametrize("kind", TIED)
def test_tied_table_split_on_either_dim_sums_both_gradients(two_ranks, kind):
    assert two_ranks.run(tied_faults, kind) == [[], []]


def tie(kind):
    module = parallelized(Embedded(), TIED[kind])
    return module.embed.weight is module.head.weight, [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("kind", TIED)
def test_a_tied_table_stays_one_parameter(two_ranks, kind):
    assert two_ranks.run(tie, kind) == [(True, ["embed.weight"])] * 2


def without_gradient():
    module = parallelized(blocks(1), RULES)
    reference = blocks(1)
    off = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            off.append((module(batch(2, 5, HIDDEN)) - reference(batch(2, 5, HIDDEN))).abs().max().item())
    return max(off) < 1e-12


def test_inference_equals_one_process(two_ranks):
    assert two_ranks.run(without_gradient) == [True, True]
