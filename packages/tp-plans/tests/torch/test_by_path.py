"""A plan's styles by the paths of one model, beside its styles by pattern."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from harness.layers import gradient_mismatches, parallelized, tp_mesh
from harness.models import jitter
from harness.ranks import RanksFailed
from tp_plans import ColwiseParallel, ParameterStyle, Plan, RowwiseParallel
from tp_plans.styles import ParallelAttention
from tp_plans.torch_styles import to_torch

HIDDEN, INNER = 6, 8


class Block(nn.Module):
    """Two fused columns, a row, a factor of the features; only some blocks have a last layer."""

    def __init__(self, *, last):
        super().__init__()
        self.number = 1
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)
        self.factor = nn.Parameter(torch.randn(INNER))
        self.last = nn.Linear(HIDDEN, HIDDEN) if last else nn.Identity()

    def forward(self, hidden):
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.last(self.down(gate.tanh() * up * self.factor))


def model():
    torch.manual_seed(0)
    made = nn.Sequential(Block(last=True), Block(last=False)).double()
    jitter(made)
    return made


RULES = {
    "*.gate_up": ColwiseParallel(fused_sizes=("number", 1)),
    "*.down": RowwiseParallel(),
    "*.factor": ParameterStyle(),
    "0.last": ColwiseParallel(use_local_output=False),
}


def by_path(reference, rules):
    module = model()
    module.load_state_dict(reference.state_dict())
    return parallelize_module(module, tp_mesh(), Plan(rules).to_torch(module))


def step(module):
    value = torch.randn(3, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for block in module:
        value = block(value)
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
    value.square().sum().backward()
    return value.detach()


def found(apply, rules):
    reference = model()
    candidate = apply(reference, rules)
    same = (step(candidate) - step(reference)).abs().max() < 1e-12
    return bool(same), list(gradient_mismatches(reference, candidate))


@pytest.mark.parametrize("apply", [by_path, parallelized])
def test_to_torch_by_path_and_by_pattern_both_give_the_whole_model(two_ranks, apply):
    assert two_ranks.run(found, apply, RULES) == [(True, [])] * 2


#: Two rules of the first block that stand at different patterns.
APART = RULES | {"0": ParallelAttention(layout=None, head_count_attrs=("number",))}


def test_rules_of_one_module_at_different_patterns_are_told_apart_by_path(two_ranks):
    assert two_ranks.run(found, by_path, APART) == [(True, [])] * 2


def test_rules_of_one_module_at_different_patterns_are_refused_by_pattern(two_ranks):
    with pytest.raises(RanksFailed, match="AlreadyParallelizedError: this Block already carries"):
        two_ranks.run(found, parallelized, APART)


def warned():
    module = model()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        by_path(module, RULES)
    return [str(warning.message) for warning in told if "parallelize" in str(warning.message)]


def test_torch_has_nothing_to_warn_of_by_path(two_ranks):
    assert two_ranks.run(warned) == [[], []]


def test_equal_rules_share_one_style():
    styles = to_torch(
        Plan({"a.up": ColwiseParallel(), "b.up": ColwiseParallel(), "c.up": ColwiseParallel(multiple_of=2)})
    )
    assert styles["a.up"] is styles["b.up"] is not styles["c.up"]
    by_paths = Plan(RULES).to_torch(model())
    assert by_paths["0.down"] is by_paths["1.down"]
    assert by_paths["0"] is by_paths["1"]
    assert set(by_paths) == {"0", "1", "0.down", "1.down", "0.last"}
