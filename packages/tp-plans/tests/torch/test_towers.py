"""Rules for vision and audio towers: what is split, what is stored sharded, what stays replicated."""

import logging
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tp_plans import ColwiseParallel, ParameterStyle, Plan, Replicate, RowwiseParallel, Shard, check
from tp_plans.infer.towers import split_towers
from tp_plans.styles import GatheredParameters, ParallelAttention


class FusedAttention(nn.Module):
    """Queries, keys and values in one matrix, as most vision towers have them."""

    def __init__(self, width, heads):
        super().__init__()
        self.num_heads = heads
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, hidden):
        query, key, value = self.qkv(hidden).reshape(len(hidden), 3, self.num_heads, -1).unbind(1)
        return self.proj((query * key * value).flatten(1))


class OwnAttention(FusedAttention):
    """The same, of a user."""


FusedAttention.__module__ = "transformers.models.tiny"


class TwoLayers(nn.Module):
    """Two linear layers."""

    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class SoftmaxMlp(TwoLayers):
    """An MLP that works on all features at once."""

    def forward(self, hidden):
        return self.fc2(torch.softmax(self.fc1(hidden), -1))


class Mlp(TwoLayers):
    """An MLP."""

    def forward(self, hidden):
        return self.fc2(nn.functional.gelu(self.fc1(hidden)))


class TextBlock(nn.Sequential):
    """A block of the language model."""


def model(*, heads=4, mlp=Mlp, attention=FusedAttention):
    block = nn.Sequential(OrderedDict(attn=attention(32, heads), mlp=mlp(32)))
    tower = nn.ModuleDict({"patches": nn.Conv2d(3, 32, 2), "blocks": nn.ModuleList([block])})
    text_block = TextBlock(OrderedDict(up=nn.Linear(16, 32), down=nn.Linear(32, 16)))
    text = nn.ModuleDict({"embed": nn.Embedding(64, 16), "layers": nn.ModuleList([text_block])})
    return nn.ModuleDict({"visual": tower, "projector": nn.Linear(32, 16), "text": text})


def rules(tp=2, **options):
    return dict(split_towers(Plan({"text.layers.*.up": ColwiseParallel()}), model(**options), tp=tp))


def test_attention_is_split_in_heads_and_an_mlp_in_features():
    found = rules()
    assert found["visual.blocks.*.attn.qkv"] == ColwiseParallel(multiple_of="head_dim", fused_sizes=(1, 1, 1))
    assert found["visual.blocks.*.attn.proj"] == RowwiseParallel(multiple_of="head_dim")
    assert found["visual.blocks.*.attn"] == ParallelAttention(
        layout=None, argument="hidden", head_count_attrs=("num_heads",)
    )
    assert found["visual.blocks.*.mlp.fc1"] == ColwiseParallel()
    assert found["visual.blocks.*.mlp.fc2"] == RowwiseParallel()


def test_layers_of_unknown_use_are_stored_sharded():
    found = rules(mlp=SoftmaxMlp)
    assert found["visual.blocks.*.mlp.fc1"] == ColwiseParallel(output_layouts=Replicate())
    assert found["projector"] == ColwiseParallel(output_layouts=Replicate())


def test_fused_projections_of_classes_outside_transformers_are_stored_sharded():
    """Their code may interleave the heads."""
    found = rules(attention=OwnAttention)
    assert found["visual.blocks.*.attn.qkv"] == ColwiseParallel(output_layouts=Replicate())
    assert "visual.blocks.*.attn" not in found


def test_split_towers_stores_large_tensors_sharded_and_leaves_the_language_model():
    found = rules()
    assert {path for path in found if not path.startswith(("visual", "projector"))} == {"text.layers.*.up"}
    assert found["visual.patches.weight"] == ParameterStyle(layout=Shard(0), gathered=True)
    assert "visual.patches.bias" not in found


class Embeddings(nn.Module):
    """Patches and positions, of which the tower around reads the table."""

    def __init__(self):
        super().__init__()
        self.position_embedding = nn.Embedding(20, 32)
        self.kind = nn.Parameter(torch.zeros(1, 48, 32))


class Tower(nn.Module):
    """A tower that reads a table of a module below."""

    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()

    def forward(self, hidden):
        return hidden + self.embeddings.position_embedding.weight.mean(0)


def test_a_table_is_gathered_for_the_module_whose_code_reads_it():
    multimodal = model()
    multimodal["visual"]["extra"] = Tower()
    found = split_towers(Plan({"text.layers.*.up": ColwiseParallel()}), multimodal, tp=2)
    assert found["visual.extra"] == GatheredParameters(names=("embeddings.position_embedding.weight",))
    assert found["visual.extra.embeddings.kind"] == ParameterStyle(layout=Shard(1), gathered=True)


def test_layers_whose_weights_are_gathered_get_no_second_rule():
    plan = Plan(
        {
            "text.layers.*.up": ColwiseParallel(),
            "text.layers.*.down": RowwiseParallel(),
            "visual.blocks.*.mlp": GatheredParameters(names=("fc1.weight", "fc2.weight")),
            "visual.blocks.*": GatheredParameters(names=("attn.qkv.weight",)),
        }
    )
    found = split_towers(plan, model(), tp=2)
    assert not any(".mlp." in pattern or "qkv" in pattern for pattern in found)
    assert found["visual.blocks.*.attn.proj"] == ColwiseParallel(output_layouts=Replicate())
    assert not check(found, model(), tp=2).errors
    twice = check(found.override({"visual.blocks.*.mlp.fc1": ColwiseParallel()}), model(), tp=2).errors
    assert any("shard of a weight that a rule of" in each.message for each in twice), twice


def test_heads_that_do_not_divide_are_stored_sharded_and_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        found = rules(tp=4, heads=2)
    assert found["visual.blocks.*.attn.qkv"] == ColwiseParallel(output_layouts=Replicate())
    assert "visual.blocks.*.attn" not in found
    assert "2 of num_heads cannot be split over tp=4" in caplog.text
    assert found["visual.blocks.*.mlp.fc2"] == RowwiseParallel()  # its features divide


def test_a_plan_without_towers_is_returned_as_it_is():
    plan = Plan({"text.layers.*.up": ColwiseParallel()})
    assert split_towers(plan, nn.ModuleDict({"text": model()["text"]}), tp=2) is plan
