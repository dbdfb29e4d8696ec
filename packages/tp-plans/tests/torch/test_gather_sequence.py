"""``GatherSequence``: full hidden states inside a module, sharded on the sequence outside."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.layers import arriving, gradient_mismatches, mismatches, parallelized
from tp_plans import (
    ColwiseParallel,
    ExpertsParallel,
    GatherSequence,
    ParameterStyle,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    Shard,
)
from tp_plans.styles import AllReduceOutput, GatheredParameters, ParallelAttention

HIDDEN, INNER = 6, 8
CUT = {"arrives": Shard(1), "plain": False, "leaves": Shard(1), "leaves_plain": False}


def activation(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, hidden_states):
        if isinstance(hidden_states, DTensor):
            raise TypeError("a DTensor came in")
        tokens = hidden_states.view(-1, HIDDEN)  # what mixtures do, which needs contiguous memory
        return self.down(self.up(tokens).view(*hidden_states.shape[:-1], INNER).cumsum(1).tanh())


class Projecting(Recurrence):
    """Mixes tokens between two split layers."""

    def forward(self, hidden_states):
        return self.down(self.up(hidden_states).cumsum(1).tanh())


class Reading(Recurrence):
    """Reads its layer's weight."""

    def forward(self, hidden_states):
        mixed = self.up(hidden_states).cumsum(1).tanh()
        return nn.functional.linear(mixed, self.down.weight, self.down.bias)


class Adding(nn.Module):
    """Bare split matrices."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(INNER, HIDDEN)), nn.Parameter(torch.randn(HIDDEN, INNER))

    def forward(self, hidden_states):
        return (hidden_states @ self.up.t()).cumsum(1).tanh() @ self.down.t()


class Dense(nn.Module):
    """Experts that take their tokens in turn; the batch is a multiple of their number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, HIDDEN, HIDDEN))

    def forward(self, hidden_states):
        experts = self.weight.shape[0]
        each = hidden_states.reshape(experts, -1, HIDDEN)
        return torch.bmm(each, self.weight).view_as(hidden_states)


class Flat(Recurrence):
    """Gives its tokens flattened, as Llama 4's mixture does."""

    def forward(self, hidden_states):
        return super().forward(hidden_states).flatten(0, 1)


class Viewing(nn.Module):
    """Views the flattened tokens as hidden states."""

    def __init__(self):
        super().__init__()
        self.flat = Flat()

    def forward(self, hidden_states):
        return hidden_states + self.flat(hidden_states).view(hidden_states.shape)


KINDS = {
    "flattened tokens": (Viewing, {"flat": GatherSequence()}),
    "alone": (Recurrence, {"": GatherSequence()}),
    "attention": (
        Projecting,
        {"": GatherSequence(inner=ParallelAttention()), "up": ColwiseParallel(), "down": RowwiseParallel()},
    ),
    "plain attention": (
        Projecting,
        {"": GatherSequence(inner=ParallelAttention(layout=None)), "up": ColwiseParallel(), "down": RowwiseParallel()},
    ),
    "gathered": (Reading, {"": GatherSequence(inner=GatheredParameters(names=("down.weight",)))}),
    "sum": (
        Adding,
        {"": GatherSequence(inner=AllReduceOutput()), "up": ParameterStyle(), "down": ParameterStyle(layout=Shard(1))},
    ),
    "experts": (Dense, {"": GatherSequence(inner=ExpertsParallel())}),
    "scattered sum": (
        Adding,
        {
            "": GatherSequence(inner=AllReduceOutput(output_layouts=Shard(1))),
            "up": ParameterStyle(),
            "down": ParameterStyle(layout=Shard(1)),
        },
    ),
}


def gathered_faults(kind, length):
    build, rules = KINDS[kind]
    return mismatches(build, rules, activation(2, length, HIDDEN), **CUT)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_gets_full_hidden_states_and_its_output_is_sharded(two_ranks, kind, length):
    assert two_ranks.run(gathered_faults, kind, length) == [[], []]


def plain_faults():
    """Hidden states that are full and plain before the first such module."""
    return mismatches(Recurrence, KINDS["alone"][1], activation(2, 5, HIDDEN), leaves=Shard(1), leaves_plain=False)


def test_a_full_plain_input_is_taken_as_it_is(two_ranks):
    assert two_ranks.run(plain_faults) == [[], []]


def keyword_faults():
    return mismatches(Recurrence, KINDS["alone"][1], activation(2, 5, HIDDEN), keyword="hidden_states", **CUT)


def test_hidden_states_may_be_passed_by_keyword(two_ranks):
    assert two_ranks.run(keyword_faults) == [[], []]


class Several(nn.Module):
    """Outputs hidden states and other things."""

    def forward(self, hidden_states, mask, *, position=None):
        return hidden_states.cumsum(1), mask, position, None


def several():
    stream = arriving(activation(2, 5, HIDDEN), Shard(1), plain=False)
    mask = torch.ones(2, 5)
    out = parallelized(Several(), {"": GatherSequence()})(stream, mask, position=stream)
    full = activation(2, 5, HIDDEN)
    cut, passed, position, nothing = out
    return (
        isinstance(out, tuple) and str(cut.placements[0]) == str(torch.distributed.tensor.Shard(1)),
        torch.allclose(cut.full_tensor(), full.cumsum(1)),
        passed is mask and nothing is None,
        not isinstance(position, DTensor) and torch.equal(position, full),
    )


def test_gather_sequence_shards_the_first_of_several_outputs(two_ranks):
    assert two_ranks.run(several) == [(True,) * 4] * 2


def other_dim_faults():
    how = CUT | {"arrives": Shard(0), "leaves": Shard(0)}
    return mismatches(Recurrence, {"": GatherSequence(sequence_dim=0)}, activation(3, 5, HIDDEN), **how)


def test_sequence_dim_may_be_any_dim(two_ranks):
    assert two_ranks.run(other_dim_faults) == [[], []]


def with_bare_faults():
    rules = {"": GatherSequence(), "scale": ParameterStyle(gathered=True)}
    return mismatches(Scaled, rules, activation(2, 5, HIDDEN), **CUT)


class Scaled(Recurrence):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(7, HIDDEN))

    def forward(self, hidden_states):
        return super().forward(hidden_states) * self.scale.sum(0)


def test_a_bare_parameter_inside_keeps_its_rule(two_ranks):
    assert two_ranks.run(with_bare_faults) == [[], []]


def counts():
    module = Recurrence()
    module.num_heads = 4
    own = parallelized(module, {"": GatherSequence(inner=ParallelAttention(head_count_attrs=("num_heads",)))})
    return own.num_heads


def test_the_inner_rule_prepares_the_module_too(two_ranks):
    assert two_ranks.run(counts) == [2, 2]


def test_an_input_that_is_replicated_stays_so_inside(two_ranks):
    assert two_ranks.run(replicated_faults) == [[], []]


def replicated_faults():
    how = CUT | {"arrives": Replicate()}
    return mismatches(Recurrence, KINDS["alone"][1], activation(2, 5, HIDDEN), **how)


class Block(nn.Module):
    """A feed-forward part whose sums over ranks are left sharded, and a mixer of tokens."""

    def __init__(self):
        super().__init__()
        self.mlp, self.mixer = Projecting(), Recurrence()

    def forward(self, hidden_states):
        transformed = self.mlp(hidden_states)
        return transformed + self.mixer(transformed)


def compiled_faults(lengths):
    """Compare rows of several lengths, the later ones symbolic in compiled code, with the same module alone."""
    rules = {
        "mlp": PrepareModuleInput(layout=Replicate(), argument="hidden_states"),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "mixer": GatherSequence(),
    }
    torch.compiler.reset()
    reference = Block().double()
    compiled = parallelized(reference, rules)
    compiled.compile(backend="aot_eager", fullgraph=True)
    faults = []
    for length in lengths:
        rows = activation(2, length, HIDDEN)
        wanted, found = reference(rows), compiled(arriving(rows, Shard(1), plain=False)).full_tensor()
        for output in (wanted, found):
            output.square().sum().backward()
        if not torch.allclose(found, wanted, atol=1e-12):
            faults.append(f"output of {length} tokens")
    return faults + list(gradient_mismatches(reference, compiled))


@pytest.mark.parametrize("lengths", [(5, 7), pytest.param((5, 7, 8), marks=pytest.mark.slow)], ids=["uneven", "both"])
def test_compiled_code_shards_rows_of_any_length(two_ranks, lengths):
    if torch.__version__ < "2.13":
        lengths = lengths[:1]  # an older compiler fails at the second; see the guide
    assert two_ranks.run(compiled_faults, lengths) == [[], []]
