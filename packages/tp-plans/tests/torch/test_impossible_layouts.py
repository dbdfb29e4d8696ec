"""A dim that a tensor does not have is refused by type on every rank, with the dims that it has."""

import pytest
import torch
from torch import nn

from harness.layers import parallelized
from harness.ranks import RanksFailed
from tp_plans import (
    ColwiseParallel,
    GatherSequence,
    ParameterStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    VocabParallelEmbedding,
)
from tp_plans.errors import LayoutError
from tp_plans.styles import ColwiseEmbedding


class Small(nn.Module):
    """An embedding, a norm and two layers; no Hugging Face class, and no config."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids):
        return self.down(self.up(self.norm(self.table(ids))))


def refused(rules):
    with pytest.raises(LayoutError) as caught:
        parallelized(Small(), rules)(torch.arange(6).view(2, 3))
    return str(caught.value)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"table": VocabParallelEmbedding(output_layouts=Shard(3))},
            "[2, 3, 8] has no dim 3 to shard, it has dims 0 to 2",
        ),
        ({"table": VocabParallelEmbedding(output_layouts=Shard(-9))}, "[2, 3, 8] has no dim -9"),
        ({"table": ColwiseEmbedding(output_layouts=Shard(5))}, "[2, 3, 8] has no dim 5"),
        ({"norm": SequenceParallel(sequence_dim=5)}, "[2, 3, 8] has no dim 5"),
        ({"norm": GatherSequence(sequence_dim=4)}, "[2, 3, 8] has no dim 4"),
        ({"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(7))}, "[2, 3, 8] has no dim 7"),
        ({"up": ColwiseParallel(output_layouts=Shard(9))}, "[2, 3, 16] has no dim 9"),
        ({"up": PrepareModuleInput(layout=Shard(6))}, "[2, 3, 8] has no dim 6"),
        ({"up.bias": ParameterStyle(layout=Shard(1))}, "[16] has no dim 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_dim_that_a_tensor_lacks_is_refused_with_those_it_has(two_ranks, rules, message):
    for said in two_ranks.run(refused, rules):
        assert message in said
        assert "correct the Shard(" in said


def apply_twice():
    parallelized(Small(), {"up": ColwiseParallel(), "u*": RowwiseParallel()})


def test_two_rules_for_one_module_are_refused_when_they_are_applied(two_ranks):
    with pytest.raises(RanksFailed, match=r"AlreadyParallelizedError: .*let one rule of the plan match each module"):
        two_ranks.run(apply_twice)
