"""Checks of models that are no trees of distinct modules: shared ones, and ones that contain themselves."""

import pytest
import torch
import transformers
from torch import nn

from tp_plans import ColwiseParallel, Plan, RowwiseParallel, check, explain
from tp_plans.hugging_face.translate import from_hugging_face
from tp_plans.infer import suggest


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Model(nn.Module):
    """One block that is gone through three times."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 8)
        block = FeedForward()
        self.blocks = nn.ModuleList([block, block, block])
        self.head = nn.Linear(8, 64, bias=False)


RULES = Plan({"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})


def on_meta(make):
    with torch.device("meta"):
        return make()


def test_a_block_at_several_places_counts_once():
    report = check(RULES, on_meta(Model), tp=2)
    assert report.errors == ()
    told = explain(RULES, on_meta(Model), tp=2)
    assert {rule.pattern: rule.places for rule in told.rules} == {
        "blocks.*.up": ("blocks.0.up",),
        "blocks.*.down": ("blocks.0.down",),
    }
    assert sum(parameter.size for parameter in told.parameters) == 4 * (2 * 64 * 8 + 2 * 24 * 8 + 24 + 8)


def test_a_model_that_contains_itself_is_checked_and_explained():
    model = on_meta(Model)
    model.blocks[0].whole = model
    model.itself = model
    assert check(RULES, model, tp=2).errors == ()
    assert explain(RULES, model, tp=2).collectives("forward") == {"all_reduce": 1}
    assert "blocks.*.up" in suggest(model).plan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bytes_are_those_of_the_parameters_type(dtype):
    model = on_meta(Model).to(dtype)
    (found,) = [f for f in check(RULES, model, tp=2).findings if f.where == "words"]
    assert found.message.startswith(f"{512 * dtype.itemsize / 1000:.3g} kB, ")


def test_check_reads_only_shapes():
    """On the meta device there is nothing else; so a check of 70 billion parameters costs no memory."""
    model = on_meta(lambda: nn.ModuleDict({"up": nn.Linear(10**6, 10**6), "down": nn.Linear(10**6, 10**6)}))
    rules = Plan({"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert check(rules, model, tp=8).errors == ()
    assert explain(rules, model, tp=8).sharded_share > 0.99


@pytest.mark.parametrize(("heads", "most"), [(8, "1, 2, 4"), (2, "1, 2")])
def test_ranks_share_the_quarters_of_codegen_in_whole_heads(heads, most):
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_positions": 32, "rotary_dim": 4}
    model = on_meta(lambda: transformers.CodeGenForCausalLM(transformers.CodeGenConfig(n_head=heads, **sizes)))
    plan = from_hugging_face(model)
    assert check(plan, model, tp=int(most[-1])).errors == ()
    assert f"use a tp out of {most}" in str(check(plan, model, tp=8).errors[0])
