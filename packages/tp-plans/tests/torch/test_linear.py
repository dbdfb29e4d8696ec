"""Column-wise and row-wise layers through torch's ``parallelize_module``; sizes divide by nothing."""

import itertools

import pytest
import torch
from torch import nn

from harness.layers import mismatches
from harness.pairwise import alternating_first
from tp_plans import ColwiseParallel, Partial, PrepareModuleInput, Replicate, RowwiseParallel, Shard

INNER, OUTER = 9, 97
DIM = {"replicate": Replicate(), "sequence": Shard(1), "features": Shard(-1), "partial": Partial()}


def layer(inner, outer, bias):
    return lambda: nn.Linear(inner, outer, bias=bias)


def activation(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def column_faults(length, bias, arrives, plain, output, use_local_output):
    return mismatches(
        layer(INNER, OUTER, bias),
        {"": ColwiseParallel(output_layouts=DIM[output], use_local_output=use_local_output)},
        activation(3, length, INNER),
        arrives=DIM[arrives],
        plain=plain,
        leaves=DIM[output],
        leaves_plain=use_local_output,
    )


def row_faults(length, bias, arrives, plain, output, use_local_output):
    reads = Shard(-1) if arrives == "features" else Replicate()
    return mismatches(
        layer(OUTER, INNER, bias),
        {"": RowwiseParallel(input_layouts=reads, output_layouts=DIM[output], use_local_output=use_local_output)},
        activation(3, length, OUTER),
        arrives=DIM[arrives],
        plain=plain,
        leaves=DIM[output],
        leaves_plain=use_local_output,
    )


def over(function, *choices):
    """The cases of a test in which this rank finds faults, so that one message to the ranks tests many cases."""
    found = {case: function(*case) for case in itertools.product(*choices)}
    return {case: told for case, told in found.items() if told}


BIAS, LENGTHS, LOCAL = (True, False), (1, 5), (True, False)


@pytest.mark.parametrize(
    ("given", "output"),
    alternating_first(
        [("replicate", True), ("replicate", False), ("sequence", False), ("features", False), ("partial", False)],
        ["features", "replicate", "sequence"],
    ),
    ids=str,
)
def test_a_column_wise_layer_equals_the_whole_one(two_ranks, given, output):
    arrives, plain = given
    cases = (LENGTHS, BIAS, (arrives,), (plain,), (output,), LOCAL)
    assert two_ranks.run(over, column_faults, *cases) == [{}, {}]


@pytest.mark.parametrize(
    ("given", "output"),
    alternating_first(
        [
            ("features", True),
            ("replicate", True),
            ("features", False),
            ("replicate", False),
            ("sequence", False),
            ("partial", False),
        ],
        ["replicate", "sequence"],
    ),
    ids=str,
)
def test_a_row_wise_layer_equals_the_whole_one(two_ranks, given, output):
    arrives, plain = given
    cases = (LENGTHS, BIAS, (arrives,), (plain,), (output,), LOCAL)
    assert two_ranks.run(over, row_faults, *cases) == [{}, {}]


def test_a_row_wise_layer_may_leave_the_sum_to_others(two_ranks):
    cases = (LENGTHS, BIAS, ("features",), LOCAL, ("partial",), (False,))
    assert two_ranks.run(over, row_faults, *cases) == [{}, {}]


def shaped_faults(style, keyword, *shape):
    return mismatches(layer(shape[-1], 6, True), {"": style}, activation(*shape), keyword=keyword)


@pytest.mark.parametrize(
    "style", [ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())]
)
@pytest.mark.parametrize("keyword", [None, "input"])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 1, 3, 8)])
def test_inputs_have_any_number_of_dims_and_may_come_by_keyword(two_ranks, style, keyword, shape):
    assert two_ranks.run(shaped_faults, style, keyword, *shape) == [[], []]


class GatedMLP(nn.Module):
    def __init__(self, hidden=8, width=OUTER):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, width), nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)

    def forward(self, hidden_states):
        return self.down(nn.functional.silu(self.gate(hidden_states)) * self.up(hidden_states))


def mlp_faults(prepare, sequence_parallel, keyword, length):
    stream = Shard(1) if sequence_parallel else Replicate()
    rules = {
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=stream, use_local_output=not sequence_parallel),
    }
    if prepare:
        rules[""] = PrepareModuleInput()
    return mismatches(
        GatedMLP,
        rules,
        activation(2, length, 8),
        arrives=stream,
        plain=not sequence_parallel,
        leaves=stream,
        leaves_plain=not sequence_parallel,
        keyword=keyword,
    )


@pytest.mark.parametrize("prepare", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_gated_mlp_of_uneven_width_is_right_with_and_without_preparing_its_input(
    two_ranks, prepare, sequence_parallel
):
    cases = ((prepare,), (sequence_parallel,), (None, "hidden_states"), LENGTHS)
    assert two_ranks.run(over, mlp_faults, *cases) == [{}, {}]
