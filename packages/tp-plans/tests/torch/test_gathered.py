"""Parameters stored split, read whole by a module above."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.layers import mismatches, parallelized
from harness.ranks import RanksFailed
from tp_plans import ColwiseParallel, Replicate, RowwiseParallel, VocabParallelEmbedding
from tp_plans.styles import GatheredParameters

HIDDEN, INNER, VOCAB = 6, 9, 11


def activation(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Kernel(nn.Module):
    """Reads its layer's weight itself, as kernels of recurrences do, and calls another."""

    def __init__(self, bias=True):
        super().__init__()
        self.inner = nn.ModuleDict({"out_proj": nn.Linear(INNER, HIDDEN, bias=bias)})
        self.in_proj = nn.Linear(HIDDEN, INNER)
        self.scale = nn.Parameter(torch.randn(5, HIDDEN))
        self.fails = False

    def forward(self, hidden_states):
        if self.fails:
            raise RuntimeError("on purpose")
        out = self.inner["out_proj"]
        mixed = self.in_proj(hidden_states).cumsum(1)
        return nn.functional.linear(mixed, out.weight, out.bias) * self.scale.sum(0)


NAMES = ("inner.out_proj.weight", "inner.out_proj.bias", "in_proj.weight", "scale")


def kernel_faults(bias):
    return mismatches(lambda: Kernel(bias), {"": GatheredParameters(names=NAMES)}, activation(2, 5, HIDDEN))


@pytest.mark.parametrize("bias", [True, False])
def test_a_weight_that_another_module_reads_is_whole_there(two_ranks, bias):
    assert two_ranks.run(kernel_faults, bias) == [[], []]


def beside_faults():
    rules = {"": GatheredParameters(names=NAMES[:1]), "in_proj": ColwiseParallel(output_layouts=Replicate())}
    return mismatches(Kernel, rules, activation(2, 5, HIDDEN))


def test_a_layer_beside_may_have_its_own_rule(two_ranks):
    assert two_ranks.run(beside_faults) == [[], []]


def after_failure():
    module = parallelized(Kernel().double(), {"": GatheredParameters(names=NAMES)})
    before = {name: id(parameter) for name, parameter in module.named_parameters()}
    module.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        module(activation(2, 5, HIDDEN))
    split = {name: isinstance(parameter, DTensor) for name, parameter in module.named_parameters()}
    return before == {name: id(parameter) for name, parameter in module.named_parameters()}, split


def test_after_an_exception_the_split_parameters_are_back(two_ranks):
    for same, split in two_ranks.run(after_failure):
        assert same
        assert split == {**dict.fromkeys(NAMES, True), "in_proj.bias": False}


def missing(name):
    parallelized(Kernel(), {"": GatheredParameters(names=(name,))})


@pytest.mark.parametrize("name", ["weight", "inner.out_proj.scale", "inner.nothing.weight"])
def test_a_name_that_is_no_parameter_is_refused_when_the_plan_is_applied(two_ranks, name):
    with pytest.raises(RanksFailed, match=rf"PlanError: Kernel has no parameter '{name}'"):
        two_ranks.run(missing, name)


class Tied(nn.Module):
    """A table that is indexed outside of its own module, and is the head's weight."""

    def __init__(self):
        super().__init__()
        self.text = nn.ModuleDict({"embed": nn.Embedding(VOCAB, HIDDEN)})
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.text["embed"].weight
        self.body = Body(self.text)

    def forward(self, ids):
        return self.head(self.body(ids))


class Body(nn.Module):
    def __init__(self, text):
        super().__init__()
        self.text = text

    def forward(self, ids):
        return self.text["embed"](ids) + self.text["embed"].weight[3]


TIED = {"body": GatheredParameters(names=("text.embed.weight",)), "head": ColwiseParallel(output_layouts=Replicate())}


def tied_faults(first):
    rules = TIED if first == "body" else dict(reversed(TIED.items()))
    return mismatches(Tied, rules, torch.tensor([[0, 5, 10], [3, 3, 9]]))


@pytest.mark.parametrize("first", ["body", "head"])
def test_a_tied_weight_stays_one_whichever_rule_comes_first(two_ranks, first):
    assert two_ranks.run(tied_faults, first) == [[], []]


def untied():
    parallelized(Tied(), TIED | {"head": RowwiseParallel(input_layouts=Replicate())})


def test_tie_that_the_plan_would_break_is_refused(two_ranks):
    with pytest.raises(RanksFailed, match=r"LayoutError: .*tied"):
        two_ranks.run(untied)


def kept_faults():
    """The head keeps its own lookup; the table is gathered for its body only."""
    rules = {"text.embed": VocabParallelEmbedding(), "head": ColwiseParallel(output_layouts=Replicate())}
    return mismatches(Plain, rules, torch.tensor([[0, 5, 10], [3, 3, 9]]))


class Plain(Tied):
    def forward(self, ids):
        return self.head(self.text["embed"](ids))


def test_a_tied_embedding_and_head_of_one_layout_collect_both_gradients(two_ranks):
    assert two_ranks.run(kept_faults) == [[], []]
