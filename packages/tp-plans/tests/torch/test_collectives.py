"""How often the ranks talk in one decoder block: as often as in Megatron-LM, and not once more."""

import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from harness.layers import parallelized
from tp_plans import ColwiseParallel, NoParallel, Replicate
from tp_plans.models import DecoderSpec, SublayerSpec, decoder_plan

HIDDEN, HEADS = 16, 4
NAMES = DecoderSpec(
    root="model",
    norms=("input_norm", "mlp_norm"),
    sublayers=(
        SublayerSpec(path="attn", colwise=("q", "k", "v"), rowwise="o", multiple_of="head_dim"),
        SublayerSpec(path="mlp", colwise=("gate", "up"), rowwise="down"),
    ),
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, hidden_states):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, HIDDEN, bias=False)

    def forward(self, hidden_states):
        return self.down(nn.functional.silu(self.gate(hidden_states)) * self.up(hidden_states))


class Block(nn.Module):
    """A Llama block with frozen norms, whose gradient sums would be counted along."""

    def __init__(self):
        super().__init__()
        self.input_norm, self.mlp_norm = (nn.RMSNorm(HIDDEN).requires_grad_(False) for _ in range(2))
        self.attn, self.mlp = Attention(), MLP()

    def forward(self, hidden):
        hidden = hidden + self.attn(self.input_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(11, HIDDEN)
        self.layers = nn.ModuleList([Block()])
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, ids):
        return self.norm(self.layers[0](self.embed_tokens(ids)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.lm_head = Inner(), nn.Linear(HIDDEN, 11, bias=False)

    def forward(self, ids):
        return self.lm_head(self.model(ids))


def counted(mode):
    return {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items() if count}


def block_collectives(sequence_parallel):
    """Collectives of the block alone, forward and backward; its input is the stream, which needs a gradient."""
    model = parallelized(Model(), decoder_plan(NAMES, name="tiny", sequence_parallel=sequence_parallel))
    stream = model.model.embed_tokens(torch.arange(6).view(1, 6)).detach().requires_grad_()
    with CommDebugMode() as forward:
        output = model.model.layers[0](stream)
    with CommDebugMode() as backward:
        output.backward(torch.ones_like(output))
    return counted(forward), counted(backward)


def test_a_tensor_parallel_block_sums_twice_forward_and_twice_backward(two_ranks):
    for forward, backward in two_ranks.run(block_collectives, False):
        assert forward == {"all_reduce": 2}
        assert backward == {"all_reduce": 2}


def test_a_sequence_parallel_block_gathers_and_scatters_as_megatron_does(two_ranks):
    for forward, backward in two_ranks.run(block_collectives, True):
        assert forward == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
        assert backward == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}


def head_collectives():
    plan = decoder_plan(NAMES, name="tiny")
    model = parallelized(Model(), plan)
    with CommDebugMode() as forward:
        logits = model.lm_head(torch.ones(1, 6, HIDDEN))
    return counted(forward), isinstance(logits, DTensor), list(logits.to_local().shape)


def test_logits_are_not_gathered(two_ranks):
    assert two_ranks.run(head_collectives) == [({}, True, [1, 6, 6]), ({}, True, [1, 6, 5])]


def inference_collectives(rules):
    module = parallelized(nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 8)), rules)
    with CommDebugMode() as forward, torch.no_grad():
        module(torch.ones(2, HIDDEN))
    return Counter(counted(forward))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"0": NoParallel(), "1": ColwiseParallel()}, {}),
        ({"0": NoParallel(gradient="partial"), "1": ColwiseParallel()}, {}),
        ({"0": NoParallel(), "1": ColwiseParallel(output_layouts=Replicate())}, {"all_gather_into_tensor": 1}),
    ],
)
def test_plan_sends_no_collective_beyond_its_layouts(two_ranks, rules, expected):
    assert two_ranks.run(inference_collectives, rules) == [expected, expected]


def host_operations(sequence_parallel):
    """What the host does in one forward and backward of the block, by the name of the Python function."""
    model = parallelized(Model(), decoder_plan(NAMES, name="tiny", sequence_parallel=sequence_parallel))
    for norm in (model.model.layers[0].input_norm, model.model.layers[0].mlp_norm):
        norm.requires_grad_(True)
    stream = model.model.embed_tokens(torch.arange(6).view(1, 6)).detach().requires_grad_()
    files = {"from_local": "tensor/_api.py", "redistribute": "tensor/_api.py", "to_local": "tensor/_api.py"}
    files |= {"apply": "autograd/function.py", "applied": "_host_time_compat.py", "with_spec": "_host_time_compat.py"}
    files |= {"autograd_impl": "_library/autograd.py", "get_group": "distributed/device_mesh.py"}
    counts = Counter()

    def profile(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_name in files and code.co_filename.endswith(files[code.co_name]):
            counts[code.co_name] += 1

    for _ in range(2):
        counts.clear()
        sys.setprofile(profile)
        output = model.model.layers[0](stream)
        output.backward(torch.ones_like(output))
        sys.setprofile(None)
    return dict(counts)


@pytest.mark.parametrize(
    ("sequence_parallel", "made", "functions"),
    [
        (False, 11, 8),  # a gradient for each of 9 parameters; into attention and MLP.  Projections share a function
        (True, 19, 10),  # also in and out of each norm, and out of attention and MLP
    ],
)
def test_a_block_makes_few_dtensors_and_autograd_functions(two_ranks, sequence_parallel, made, functions):
    for counts in two_ranks.run(host_operations, sequence_parallel):
        assert counts == {"with_spec": made, "applied": functions, "apply": functions}  # forward and backward
