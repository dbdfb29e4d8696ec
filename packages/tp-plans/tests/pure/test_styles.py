import dataclasses
import json
from typing import get_args

import pytest

from tp_plans import (
    ColwiseParallel,
    NoParallel,
    ParameterStyle,
    Partial,
    PlanError,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    Style,
    VocabParallelEmbedding,
)
from tp_plans.errors import UnknownStyleError
from tp_plans.styles import ParallelAttention, style_from_dict, style_to_dict

STYLES = get_args(Style)


@pytest.mark.parametrize("cls", STYLES)
def test_a_style_of_defaults_is_only_its_name_in_json(cls):
    assert style_to_dict(cls()) == {"style": cls.__name__}


@pytest.mark.parametrize(
    ("style", "data"),
    [
        (ColwiseParallel(output_layouts=Replicate()), {"style": "ColwiseParallel", "output_layouts": "replicate"}),
        (ColwiseParallel(multiple_of="head_dim"), {"style": "ColwiseParallel", "multiple_of": "head_dim"}),
        (
            RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False, multiple_of=4),
            {
                "style": "RowwiseParallel",
                "input_layouts": "replicate",
                "output_layouts": "shard(1)",
                "use_local_output": False,
                "multiple_of": 4,
            },
        ),
        (RowwiseParallel(output_layouts=Partial()), {"style": "RowwiseParallel", "output_layouts": "partial"}),
        (
            VocabParallelEmbedding(output_layouts=Shard(1)),
            {"style": "VocabParallelEmbedding", "output_layouts": "shard(1)"},
        ),
        (SequenceParallel(sequence_dim=0), {"style": "SequenceParallel", "sequence_dim": 0}),
        (NoParallel(gradient="partial"), {"style": "NoParallel", "gradient": "partial"}),
        (
            PrepareModuleInput(layout=Shard(1), argument="inputs_embeds", position=None),
            {"style": "PrepareModuleInput", "layout": "shard(1)", "argument": "inputs_embeds", "position": None},
        ),
        (
            ColwiseParallel(multiple_of="head_dim", fused_sizes=("num_heads", 2, 2), replicate_kv_heads=True),
            {
                "style": "ColwiseParallel",
                "multiple_of": "head_dim",
                "fused_sizes": ["num_heads", 2, 2],
                "replicate_kv_heads": True,
            },
        ),
        (
            ParallelAttention(head_count_attrs=("num_heads", "config.num_attention_heads")),
            {"style": "ParallelAttention", "head_count_attrs": ["num_heads", "config.num_attention_heads"]},
        ),
        (
            ParameterStyle(layout=Replicate(), gradient="partial"),
            {"style": "ParameterStyle", "layout": "replicate", "gradient": "partial"},
        ),
    ],
)
def test_json_form_says_what_differs_from_the_defaults(style, data):
    assert style_to_dict(style) == data
    assert style_from_dict(json.loads(json.dumps(data))) == style


def test_reading_leaves_the_data_as_it_was():
    data = {"style": "ColwiseParallel", "output_layouts": "replicate"}
    style_from_dict(data)
    assert data == {"style": "ColwiseParallel", "output_layouts": "replicate"}


@pytest.mark.parametrize("name", ["colwise", "Colwise", "", None, 3, ["ColwiseParallel"]])
def test_an_unknown_style_is_named_together_with_those_known(name):
    with pytest.raises(UnknownStyleError) as caught:
        style_from_dict({"style": name})
    assert repr(name) in str(caught.value)
    assert all(cls.__name__ in str(caught.value) for cls in STYLES)


def test_data_without_a_style_is_refused():
    with pytest.raises(UnknownStyleError, match="None is not a style"):
        style_from_dict({"output_layouts": "replicate"})


def test_an_unknown_field_is_named_together_with_those_known():
    with pytest.raises(PlanError, match=r"NoParallel has no field grad, out: its fields are gradient"):
        style_from_dict({"style": "NoParallel", "grad": "full", "out": 1})


@pytest.mark.parametrize(
    ("style", "field", "value"),
    [
        (ColwiseParallel, "output_layouts", 3),
        (ColwiseParallel, "output_layouts", None),
        (ColwiseParallel, "output_layouts", Partial()),
        (ColwiseParallel, "use_local_output", "false"),
        (ColwiseParallel, "use_local_output", 1),
        (ColwiseParallel, "multiple_of", 0),
        (ColwiseParallel, "multiple_of", -2),
        (ColwiseParallel, "multiple_of", 1.5),
        (ColwiseParallel, "multiple_of", True),
        (ColwiseParallel, "multiple_of", None),
        (ColwiseParallel, "multiple_of", ""),
        (ColwiseParallel, "multiple_of", "16"),
        (ColwiseParallel, "multiple_of", "head dim"),
        (RowwiseParallel, "input_layouts", 1),
        (RowwiseParallel, "input_layouts", Shard(1)),
        (RowwiseParallel, "input_layouts", Partial()),
        (RowwiseParallel, "output_layouts", 0),
        (RowwiseParallel, "multiple_of", []),
        (VocabParallelEmbedding, "output_layouts", True),
        (VocabParallelEmbedding, "use_local_output", None),
        (SequenceParallel, "sequence_dim", "1"),
        (SequenceParallel, "sequence_dim", False),
        (NoParallel, "gradient", "whole"),
        (NoParallel, "gradient", None),
        (NoParallel, "gradient", ["full"]),
        (PrepareModuleInput, "layout", 1),
        (PrepareModuleInput, "layout", Partial()),
        (PrepareModuleInput, "argument", None),
        (PrepareModuleInput, "argument", ""),
        (PrepareModuleInput, "position", "0"),
        (PrepareModuleInput, "position", -1),
        (PrepareModuleInput, "position", True),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_by_name_with_what_would_do(style, field, value):
    with pytest.raises(PlanError) as caught:
        style(**{field: value})
    assert f"{style.__name__}.{field} is {value!r}" in str(caught.value)
    assert "write" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"style": "ColwiseParallel", "output_layouts": 3}, r"ColwiseParallel\.output_layouts is 3"),
        ({"style": "ColwiseParallel", "output_layouts": "shard"}, "'shard' is not a layout"),
        ({"style": "ColwiseParallel", "multiple_of": [2]}, r"ColwiseParallel\.multiple_of is \[2\]"),
        ({"style": "PrepareModuleInput", "layout": None}, r"PrepareModuleInput\.layout is None"),
        ({"style": "ColwiseParallel", "fused_sizes": [1]}, r"two or more"),
        ({"style": "ColwiseParallel", "fused_sizes": [1, 1], "output_layouts": "replicate"}, r"not gathered"),
        ({"style": "ColwiseParallel", "replicate_kv_heads": True, "use_local_output": False}, r"use_local_output"),
        ({"style": "RowwiseParallel", "fused_sizes": [1, 1], "input_layouts": "replicate"}, r"arrives split"),
        ({"style": "ParameterStyle", "layout": "replicate", "gathered": True}, r"already full"),
        ({"style": "ParameterStyle", "gradient": "partial"}, r"this rank's alone"),
        ({"style": "ParallelAttention", "head_count_attrs": ["num heads"]}, r"attributes' names"),
    ],
)
def test_wrong_values_in_json_are_refused_too(data, message):
    with pytest.raises(PlanError, match=message):
        style_from_dict(data)


def test_data_that_holds_itself_is_refused():
    data = {"style": "GatherSequence"}
    data["inner"] = data
    with pytest.raises(PlanError, match=r"GatherSequence\.inner has an 'inner' too: write a style"):
        style_from_dict(data)


def test_replacing_a_field_checks_it_again():
    with pytest.raises(PlanError, match="multiple_of"):
        dataclasses.replace(ColwiseParallel(), multiple_of=0)


@pytest.mark.parametrize("cls", STYLES)
def test_styles_are_values(cls):
    assert cls() == cls()
    assert hash(cls()) == hash(cls())
    fields = dataclasses.fields(cls)
    with pytest.raises(AttributeError if fields else TypeError):  # a slotted class without fields tells it so
        setattr(cls(), fields[0].name if fields else "anything", None)
