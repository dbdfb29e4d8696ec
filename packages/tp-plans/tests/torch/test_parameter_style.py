"""Parameters that no layer calls its weight, each with its own part or the whole in its owner's forward."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Cut

from harness.layers import mismatches, parallelized, tp_mesh
from tp_plans import ColwiseParallel, ParameterStyle, Replicate, RowwiseParallel, Shard
from tp_plans.styles import ParallelAttention

HIDDEN, HEADS, WIDTH = 6, 4, 3


class Gated(nn.Module):
    """Heads with a number each, a table that all ranks use whole, and one that each uses for its heads."""

    def __init__(self, rows=5):
        super().__init__()
        self.columns, self.row = nn.Linear(HIDDEN, HEADS * WIDTH), nn.Linear(HEADS * WIDTH, HIDDEN)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.gates = nn.Parameter(torch.randn(WIDTH, HEADS))
        self.table = nn.Parameter(torch.randn(rows, HIDDEN))
        self.shared = nn.Parameter(torch.randn(rows, WIDTH))
        self.scale = nn.Parameter(torch.randn(1))
        self.factor = nn.Parameter(torch.randn(()))

    def forward(self, hidden_states):
        hidden = hidden_states + self.table.sum(0)
        heads = self.columns(hidden).unflatten(-1, (-1, WIDTH))
        heads = heads * self.sinks.unsqueeze(-1) + self.gates.t() + self.shared.sum(0) * self.scale
        return self.row(heads.flatten(-2)) * self.factor


RULES = {
    "columns": ColwiseParallel(multiple_of=WIDTH),
    "row": RowwiseParallel(multiple_of=WIDTH),
    "sinks": ParameterStyle(),
    "gates": ParameterStyle(layout=Shard(1)),
    "table": ParameterStyle(gathered=True),
    "shared": ParameterStyle(gathered=True, gradient="partial"),
    "scale": ParameterStyle(layout=Replicate(), gradient="partial"),
    "factor": ParameterStyle(layout=Replicate()),
}


def activation(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def bare_faults(rows, more):
    return mismatches(lambda: Gated(rows), RULES | more, activation(2, 5, HIDDEN))


@pytest.mark.parametrize("more", [{}, {"": ParallelAttention(layout=None)}], ids=["alone", "beside the owner's rule"])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_split_gathered_and_whole_parameters_are_right(four_ranks, rows, more):
    assert four_ranks.run(bare_faults, rows, more) == [[]] * 4


def test_a_wide_table_may_lie_along_its_last_dim(two_ranks):
    more = {"table": ParameterStyle(layout=Shard(1), gathered=True)}
    assert two_ranks.run(bare_faults, 5, more) == [[], []]


def placements():
    module = parallelized(Gated(), RULES)
    return {name: parameter.placements for name, parameter in module.named_parameters() if "." not in name}


def test_parameters_lie_as_their_rules_say(two_ranks):
    expected = {"sinks": (Cut(0),), "gates": (Cut(1),), "table": (Cut(0),), "shared": (Cut(0),)}
    assert two_ranks.run(placements) == [expected | {"scale": (Whole(),), "factor": (Whole(),)}] * 2


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first_table, self.second_table = (nn.Parameter(torch.randn(5, HIDDEN)) for _ in range(2))
        self.other = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, hidden_states):
        return hidden_states * self.first_table.sum(0) + self.second_table.prod(0) * self.other


def pattern_faults():
    return mismatches(Pair, {"*_table": ParameterStyle(gathered=True)}, activation(2, HIDDEN))


def left_alone():
    module = parallelized(Pair(), {"*_table": ParameterStyle(gathered=True)})
    return [isinstance(parameter, DTensor) for parameter in module.parameters()]


def test_one_rule_may_stand_for_several_parameters_and_leaves_the_others(two_ranks):
    assert two_ranks.run(pattern_faults) == [[], []]
    assert two_ranks.run(left_alone) == [[True, True, False]] * 2


class Shared(nn.Module):
    """Two modules that hold one parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Pair(), Pair()
        self.second.first_table = self.first.first_table

    def forward(self, hidden_states):
        return self.first(hidden_states) + self.second(hidden_states)


def tied():
    module = parallelized(Shared(), {"*.*_table": ParameterStyle(gathered=True)})
    return module.first.first_table is module.second.first_table, module.first.first_table.device_mesh == tp_mesh()


def test_tied_bare_parameters_stay_one(two_ranks):
    assert two_ranks.run(tied) == [(True, True)] * 2


def tied_faults():
    return mismatches(Shared, {"*.*_table": ParameterStyle(gathered=True)}, activation(2, HIDDEN))


def test_tied_bare_parameters_collect_both_gradients(two_ranks):
    assert two_ranks.run(tied_faults) == [[], []]
