import dataclasses
import json
from typing import get_args

import pytest

from tp_plans import (
    BareParameter,
    ColwiseParallel,
    ParallelAttention,
    Partial,
    PlanError,
    PrepareInput,
    Replicate,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    Style,
    UnknownStyleError,
    VocabParallelEmbedding,
)
from tp_plans.styles import style_from_dict, style_to_dict

STYLES = get_args(Style)


@pytest.mark.parametrize("cls", STYLES)
def test_a_style_of_defaults_is_only_its_name_in_json(cls):
    assert style_to_dict(cls()) == {"style": cls.__name__}


@pytest.mark.parametrize(
    ("style", "data"),
    [
        (ColwiseParallel(output=Replicate()), {"style": "ColwiseParallel", "output": "replicate"}),
        (ColwiseParallel(unit="head_dim"), {"style": "ColwiseParallel", "unit": "head_dim"}),
        (
            RowwiseParallel(input=Replicate(), output=Shard(1), use_local_output=False, unit=4),
            {
                "style": "RowwiseParallel",
                "input": "replicate",
                "output": "shard(1)",
                "use_local_output": False,
                "unit": 4,
            },
        ),
        (RowwiseParallel(output=Partial()), {"style": "RowwiseParallel", "output": "partial"}),
        (VocabParallelEmbedding(output=Shard(1)), {"style": "VocabParallelEmbedding", "output": "shard(1)"}),
        (SequenceParallel(sequence_dim=0), {"style": "SequenceParallel", "sequence_dim": 0}),
        (Replicated(gradient="partial"), {"style": "Replicated", "gradient": "partial"}),
        (
            PrepareInput(layout=Shard(1), argument="inputs_embeds", position=None),
            {"style": "PrepareInput", "layout": "shard(1)", "argument": "inputs_embeds", "position": None},
        ),
        (
            ColwiseParallel(unit="head_dim", pieces=("num_heads", 2, 2), shared=True),
            {"style": "ColwiseParallel", "unit": "head_dim", "pieces": ["num_heads", 2, 2], "shared": True},
        ),
        (
            ParallelAttention(counts=("num_heads", "config.num_attention_heads")),
            {"style": "ParallelAttention", "counts": ["num_heads", "config.num_attention_heads"]},
        ),
        (
            BareParameter(layout=Replicate(), gradient="partial"),
            {"style": "BareParameter", "layout": "replicate", "gradient": "partial"},
        ),
    ],
)
def test_json_form_says_what_differs_from_the_defaults(style, data):
    assert style_to_dict(style) == data
    assert style_from_dict(json.loads(json.dumps(data))) == style


def test_reading_leaves_the_data_as_it_was():
    data = {"style": "ColwiseParallel", "output": "replicate"}
    style_from_dict(data)
    assert data == {"style": "ColwiseParallel", "output": "replicate"}


@pytest.mark.parametrize("name", ["colwise", "Colwise", "", None, 3, ["ColwiseParallel"]])
def test_an_unknown_style_is_named_together_with_those_known(name):
    with pytest.raises(UnknownStyleError) as caught:
        style_from_dict({"style": name})
    assert repr(name) in str(caught.value)
    assert all(cls.__name__ in str(caught.value) for cls in STYLES)


def test_data_without_a_style_is_refused():
    with pytest.raises(UnknownStyleError, match="None is not a style"):
        style_from_dict({"output": "replicate"})


def test_an_unknown_field_is_named_together_with_those_known():
    with pytest.raises(PlanError, match=r"Replicated has no field grad, out: its fields are gradient"):
        style_from_dict({"style": "Replicated", "grad": "full", "out": 1})


@pytest.mark.parametrize(
    ("style", "field", "value"),
    [
        (ColwiseParallel, "output", 3),
        (ColwiseParallel, "output", None),
        (ColwiseParallel, "output", Partial()),
        (ColwiseParallel, "use_local_output", "false"),
        (ColwiseParallel, "use_local_output", 1),
        (ColwiseParallel, "unit", 0),
        (ColwiseParallel, "unit", -2),
        (ColwiseParallel, "unit", 1.5),
        (ColwiseParallel, "unit", True),
        (ColwiseParallel, "unit", None),
        (ColwiseParallel, "unit", ""),
        (ColwiseParallel, "unit", "16"),
        (ColwiseParallel, "unit", "head dim"),
        (RowwiseParallel, "input", 1),
        (RowwiseParallel, "input", Shard(1)),
        (RowwiseParallel, "input", Partial()),
        (RowwiseParallel, "output", 0),
        (RowwiseParallel, "unit", []),
        (VocabParallelEmbedding, "output", True),
        (VocabParallelEmbedding, "use_local_output", None),
        (SequenceParallel, "sequence_dim", "1"),
        (SequenceParallel, "sequence_dim", False),
        (Replicated, "gradient", "whole"),
        (Replicated, "gradient", None),
        (Replicated, "gradient", ["full"]),
        (PrepareInput, "layout", 1),
        (PrepareInput, "layout", Partial()),
        (PrepareInput, "argument", None),
        (PrepareInput, "argument", ""),
        (PrepareInput, "position", "0"),
        (PrepareInput, "position", -1),
        (PrepareInput, "position", True),
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
        ({"style": "ColwiseParallel", "output": 3}, r"ColwiseParallel\.output is 3"),
        ({"style": "ColwiseParallel", "output": "shard"}, "'shard' is not a layout"),
        ({"style": "ColwiseParallel", "unit": [2]}, r"ColwiseParallel\.unit is \[2\]"),
        ({"style": "PrepareInput", "layout": None}, r"PrepareInput\.layout is None"),
        ({"style": "ColwiseParallel", "pieces": [1]}, r"two or more"),
        ({"style": "ColwiseParallel", "pieces": [1, 1], "output": "replicate"}, r"not gathered"),
        ({"style": "ColwiseParallel", "shared": True, "use_local_output": False}, r"use_local_output"),
        ({"style": "RowwiseParallel", "pieces": [1, 1], "input": "replicate"}, r"arrives split"),
        ({"style": "BareParameter", "layout": "replicate", "gathered": True}, r"whole already"),
        ({"style": "BareParameter", "gradient": "partial"}, r"this rank's alone"),
        ({"style": "ParallelAttention", "counts": ["num heads"]}, r"attributes' names"),
    ],
)
def test_wrong_values_in_json_are_refused_too(data, message):
    with pytest.raises(PlanError, match=message):
        style_from_dict(data)


def test_data_that_holds_itself_is_refused():
    data = {"style": "WholeSequence"}
    data["around"] = data
    with pytest.raises(PlanError, match=r"WholeSequence\.around has an 'around' of its own: write a style"):
        style_from_dict(data)


def test_replacing_a_field_checks_it_again():
    with pytest.raises(PlanError, match="unit"):
        dataclasses.replace(ColwiseParallel(), unit=0)


@pytest.mark.parametrize("cls", STYLES)
def test_styles_are_values(cls):
    assert cls() == cls()
    assert hash(cls()) == hash(cls())
    fields = dataclasses.fields(cls)
    with pytest.raises(AttributeError if fields else TypeError):  # a slotted class without fields tells it so
        setattr(cls(), fields[0].name if fields else "anything", None)
