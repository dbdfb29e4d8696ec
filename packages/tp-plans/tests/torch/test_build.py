"""Rules that torch cannot apply where they stand go to the module above."""

import pytest
from torch import nn

from harness.layers import parallelized
from tp_plans import ColwiseParallel, ParameterStyle, PlanError, RowwiseParallel
from tp_plans.styles import MLAKVProjection, ParallelAttention
from tp_plans.torch_styles.build import ParentRules, group_by_parent

FUSED = ColwiseParallel(multiple_of="head_dim", fused_sizes=("num_heads", "kv_heads", "kv_heads"))


def test_a_rule_that_needs_nothing_stays_where_it_stands():
    numbers = ColwiseParallel(fused_sizes=(1, 1))
    rules = {"a.*.up": numbers, "a.*.down": RowwiseParallel(), "": ParallelAttention()}
    assert group_by_parent(rules) == {pattern: (style, ParentRules()) for pattern, style in rules.items()}


def test_bare_parameters_and_rules_with_names_go_to_the_module_above():
    sinks = ParameterStyle()
    assert group_by_parent(
        {"a.*.attn.sinks": sinks, "a.*.attn.qkv": FUSED, "a.*.attn": ParallelAttention(), "scale": sinks}
    ) == {
        "a.*.attn": (ParallelAttention(), ParentRules(parameter_rules={"sinks": sinks}, children={"qkv": FUSED})),
        "": (None, ParentRules(parameter_rules={"scale": sinks})),
    }


@pytest.mark.parametrize("style", [ParameterStyle(), FUSED, MLAKVProjection()])
def test_a_rule_of_the_model_itself_that_needs_something_above_is_refused(style):
    with pytest.raises(PlanError, match=f"the rule '' is {type(style).__name__}"):
        group_by_parent({"": style})


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim, self.num_heads, self.kv_heads = 2, 4, 2
        self.qkv = nn.Linear(6, 16)


def numbers_read():
    """One rule for attention in all blocks, one for its fused layer in the first."""
    rules = {"*": ParallelAttention(head_count_attrs=("num_heads",)), "0.qkv": FUSED}
    first = parallelized(nn.ModuleList([Attention(), Attention()]), rules)[0]
    return first.num_heads, first.qkv.tp_style.style.fused_sizes


def test_numbers_are_read_before_another_rule_changes_them(two_ranks):
    assert two_ranks.run(numbers_read) == [(2, (4, 2, 2))] * 2
