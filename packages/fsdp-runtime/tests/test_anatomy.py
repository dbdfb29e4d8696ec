"""Blocks are found by structure, whatever the model calls them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_runtime import ModelError, anatomy_of
from harness.models import tiny_model


def _block(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def test_blocks_of_a_text_model() -> None:
    assert list(anatomy_of(tiny_model("LlamaForCausalLM")).blocks) == ["model.layers.0", "model.layers.1"]


def test_the_decoder_of_a_vision_language_model_is_its_largest_stack() -> None:
    anatomy = anatomy_of(tiny_model("Gemma3ForConditionalGeneration"))
    assert anatomy.decoder == ("model.language_model.layers.0", "model.language_model.layers.1")
    assert [path for path in anatomy.blocks if "vision" in path] == ["model.vision_tower.encoder.layers.0"]
    assert anatomy.last_block is anatomy.blocks["model.language_model.layers.1"]


def test_lists_inside_a_block_are_part_of_it() -> None:
    block = nn.Module()
    block.experts = nn.ModuleList([_block(), _block()])
    model = nn.Module()
    model.encoder = nn.ModuleList([block])
    assert list(anatomy_of(model).blocks) == ["encoder.0"]


def test_lists_of_plain_layers_are_no_blocks() -> None:
    model = nn.Module()
    model.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.layers = nn.ModuleList([_block()])
    assert list(anatomy_of(model).blocks) == ["layers.0"]


def test_a_model_without_blocks_is_refused_with_advice() -> None:
    with pytest.raises(ModelError, match=r"Linear has no nn\.ModuleList of blocks.*keep the repeated layers"):
        anatomy_of(nn.Linear(2, 2))


def test_the_meta_device_is_enough() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList([_block()])
    assert anatomy_of(model).decoder == ("layers.0",)
