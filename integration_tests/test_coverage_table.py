"""The table of architectures is whole, and its models are what a measurement needs."""

from __future__ import annotations

import pytest
import torch

from coverage.shrink import HEADS, VOCAB, tiny_fields
from coverage.table import UNBUILDABLE, entries, planned_causal_models, tiny_model
from harness.parity import logits_of

#: Few enough to build in a test, and of every make: dense, mixture, recurrent, remote code.
SOME = ["llama", "deepseek_v3", "qwen3_next", "baichuan"]


def test_every_causal_model_with_a_plan_has_a_row() -> None:
    assert {entry.name for entry in planned_causal_models()} <= entries().keys()
    assert len(planned_causal_models()) >= 108


def test_rows_without_a_model_are_in_the_table_and_say_why() -> None:
    assert UNBUILDABLE.keys() <= entries().keys()
    assert all(UNBUILDABLE.values())


@pytest.mark.parametrize("name", SOME)
def test_a_tiny_model_is_the_same_whenever_it_is_built(name: str) -> None:
    first, second = (dict(tiny_model(entries()[name]).named_parameters()) for _ in range(2))
    assert all(torch.equal(parameter, second[path]) for path, parameter in first.items())


@pytest.mark.parametrize("name", [*SOME, "deepseek_v4"])  # the last one keeps large parameters in float32
def test_numbers_within_a_parameter_are_unique(name: str) -> None:
    for path, parameter in tiny_model(entries()[name]).named_parameters():
        assert parameter.unique().numel() == parameter.numel(), path


@pytest.mark.parametrize("name", SOME)
def test_the_loss_reaches_every_parameter(name: str) -> None:
    model = tiny_model(entries()[name])
    logits_of(model, {"input_ids": torch.arange(3, 3 + 35).view(5, 7)}).sum().backward()
    assert [path for path, parameter in model.named_parameters() if parameter.grad is None] == []


def test_every_kind_of_layer_stays_when_a_config_shrinks() -> None:
    default = {
        "num_hidden_layers": 12,
        "layer_types": ["linear", "linear", "full"] * 4,
        "mlp_layer_types": ["dense"] + ["sparse"] * 11,
    }
    fields = tiny_fields(default)
    assert fields["num_hidden_layers"] == 2
    assert fields["layer_types"] == ["linear", "full"]
    assert fields["mlp_layer_types"] == ["dense", "sparse"]


def test_sizes_that_a_config_leaves_open_stay_open() -> None:
    assert tiny_fields({"vocab_size": 50_000, "n_group": None, "pad_token_id": None}) == {
        "vocab_size": VOCAB,
        "pad_token_id": 0,
    }


def test_latent_attention_keeps_as_many_key_heads_as_heads() -> None:
    fields = tiny_fields({"num_attention_heads": 64, "num_key_value_heads": 64, "qk_rope_head_dim": 64, "head_dim": 64})
    assert fields["num_key_value_heads"] == fields["num_attention_heads"] == HEADS
    assert fields["head_dim"] == fields["qk_rope_head_dim"]
