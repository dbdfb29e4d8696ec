"""Rules for modules that share their parameters with modules that have rules."""

from torch import nn

from tp_plans import ColwiseParallel, Plan, RowwiseParallel, check
from tp_plans.infer.complete import tied_modules
from tp_plans.model_tree import ModelTree
from tp_plans.planned_tree import PlannedTree


class Stack(nn.Module):
    """Two blocks of an MLP."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16), "own": nn.Linear(16, 16)})
            for _ in range(2)
        )


def model(*, tied):
    both = nn.ModuleDict({"encoder": Stack(), "decoder": Stack()})
    for one, other in zip(both["encoder"].layers, both["decoder"].layers, strict=True):
        for name in tied:
            other[name].weight, other[name].bias = one[name].weight, one[name].bias
    return both


PLAN = Plan({"encoder.layers.*.up": ColwiseParallel(), "encoder.layers.*.down": RowwiseParallel()})


def test_a_decoder_of_the_encoder_s_weights_gets_the_rules_of_the_encoder():
    both = model(tied=("up", "down"))
    assert check(PLAN, both, tp=2).errors  # one parameter with two layouts
    found = tied_modules(PlannedTree(ModelTree.of(both), PLAN), "")
    assert found == {"decoder.layers.*.up": ColwiseParallel(), "decoder.layers.*.down": RowwiseParallel()}
    assert not check(PLAN.override(found), both, tp=2).errors


def test_modules_with_weights_of_their_own_and_tied_tables_get_no_rules():
    assert tied_modules(PlannedTree(ModelTree.of(model(tied=())), PLAN), "") == {}
    tables = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    tables["head"].weight = tables["embed"].weight
    assert tied_modules(PlannedTree(ModelTree.of(tables), Plan({"head": ColwiseParallel()})), "") == {}
