"""Blocks are found by structure, whatever the model calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_runtime import ModelError
from fsdp_runtime.model import AttentionHeads, inspect_model
from harness.models import tiny_model


def _block(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def test_blocks_of_a_text_model() -> None:
    assert list(inspect_model(tiny_model("LlamaForCausalLM")).blocks) == ["model.layers.0", "model.layers.1"]


def test_the_decoder_of_a_vision_language_model_lies_beside_its_token_embedding() -> None:
    structure = inspect_model(tiny_model("Gemma3ForConditionalGeneration"))
    assert structure.decoder == ("model.language_model.layers.0", "model.language_model.layers.1")
    assert [path for path in structure.blocks if "vision" in path] == ["model.vision_tower.encoder.layers.0"]


def test_lists_inside_a_block_are_part_of_it() -> None:
    class Mixture(nn.Module):
        pass

    block = Mixture()
    block.experts = nn.ModuleList([_block(), _block()])
    model = nn.Module()
    model.encoder = nn.ModuleList([block])
    assert list(inspect_model(model).blocks) == ["encoder.0"]


def test_lists_of_plain_layers_are_no_blocks() -> None:
    model = nn.Module()
    model.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.layers = nn.ModuleList([_block()])
    assert list(inspect_model(model).blocks) == ["layers.0"]


def test_lists_of_lists_are_one_stack() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([_block(), _block()]), nn.ModuleList([_block()])])
    assert inspect_model(model).decoder == ("stages.0.0", "stages.0.1", "stages.1.0")


def test_bare_modules_are_no_blocks_but_what_they_hold_is() -> None:
    level = nn.Module()  # nothing calls it, as the levels of a VQ-VAE
    level.resnets, level.downsample = nn.ModuleList([_block(), _block()]), nn.Linear(4, 4)
    model = nn.Module()
    model.levels = nn.ModuleList([level])
    assert list(inspect_model(model).blocks) == ["levels.0.resnets.0", "levels.0.resnets.1"]


def test_dicts_and_sequences_of_one_class_are_stacks() -> None:
    model = nn.Module()
    model.vision = nn.Sequential(_block(), _block())
    model.layers = nn.ModuleDict({"first": _block(8), "second": _block(8)})
    structure = inspect_model(model)
    assert structure.decoder == ("layers.first", "layers.second")
    assert list(structure.tree.stacks) == ["vision", "layers"]


def test_a_dict_of_a_models_unlike_parts_is_no_stack() -> None:
    model = nn.Module()
    model.transformer = nn.ModuleDict({"wte": nn.Embedding(9, 4), "h": nn.ModuleList([_block()])})
    assert inspect_model(model).decoder == ("transformer.h.0",)
    assert inspect_model(model).embedding == "transformer.wte"


def test_embedding_and_head_of_any_model_are_found_by_shape() -> None:
    model = nn.Module()
    model.positions = nn.Embedding(5, 4)
    model.tokens = nn.Embedding(9, 4)
    model.encoder = nn.Module()
    model.encoder.layers = nn.ModuleList([_block()])
    model.projection = nn.Linear(4, 9)
    structure = inspect_model(model)
    assert (structure.decoder, structure.embedding, structure.lm_head) == (
        ("encoder.layers.0",),
        "tokens",
        "projection",
    )


def test_heads_are_counted_from_widths_layer_by_layer() -> None:
    heads = inspect_model(tiny_model("LlamaForCausalLM", num_key_value_heads=2)).heads
    assert heads == dict.fromkeys(["model.layers.0", "model.layers.1"], AttentionHeads(query=4, key_value=2, dim=16))


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "pad_token_id": 0}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def _config(family: str) -> Any:
    import transformers

    text, vision = dict(TEXT), dict(VISION)
    mrope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    match family:
        case "Mistral3":
            return transformers.Mistral3Config(
                text_config={**text, "model_type": "mistral"}, vision_config={**vision, "model_type": "pixtral"}
            )
        case "Llava":
            return transformers.LlavaConfig(
                text_config={**text, "model_type": "llama"}, vision_config={**vision, "model_type": "clip_vision_model"}
            )
        case "Qwen2VL" | "Qwen2_5_VL" | "Qwen3VL":
            tower = {"depth": 2, "hidden_size": 32, "num_heads": 2}
            text |= {"rope_parameters": mrope}
            return getattr(transformers, f"{family}Config")(text_config=text, vision_config=tower)
        case "Llama4":
            text |= {"intermediate_size_mlp": 96, "num_local_experts": 2}
            return transformers.Llama4Config(text_config=text, vision_config=vision)
        case "SmolVLM":
            return transformers.SmolVLMConfig(text_config={**text, "model_type": "llama"}, vision_config=vision)
    raise ValueError(family)


@pytest.mark.parametrize(
    ("family", "decoder", "tower", "embedding", "head"),
    [
        ("Mistral3", "model.language_model.layers", "model.vision_tower", "model.language_model", "lm_head"),
        ("Llava", "model.language_model.layers", "model.vision_tower", "model.language_model", "lm_head"),
        ("Qwen2VL", "model.language_model.layers", "model.visual", "model.language_model", "lm_head"),
        ("Qwen2_5_VL", "model.language_model.layers", "model.visual", "model.language_model", "lm_head"),
        ("Qwen3VL", "model.language_model.layers", "model.visual", "model.language_model", "lm_head"),
        (
            "Llama4",
            "language_model.model.layers",
            "vision_model",
            "language_model.model",
            "language_model.lm_head",
        ),
        ("SmolVLM", "model.text_model.layers", "model.vision_model", "model.text_model", "lm_head"),
    ],
)
def test_the_parts_of_vision_language_families(
    family: str, decoder: str, tower: str, embedding: str, head: str
) -> None:
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForConditionalGeneration")(_config(family))
    structure = inspect_model(model)
    assert structure.decoder == tuple(f"{decoder}.{index}" for index in range(3))
    assert all(path.startswith((f"{tower}.", f"{decoder}.")) for path in structure.blocks)
    assert (structure.embedding, structure.lm_head) == (f"{embedding}.embed_tokens", head)
    assert structure.heads[structure.decoder[0]] == AttentionHeads(query=4, key_value=2, dim=16)
    assert sum(path.startswith(tower) for path in structure.blocks) >= 2


def test_a_model_without_blocks_is_refused_with_advice() -> None:
    with pytest.raises(ModelError, match=r"Linear has no nn\.ModuleList of blocks.*keep the repeated layers"):
        inspect_model(nn.Linear(2, 2))


def test_the_meta_device_is_enough() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList([_block()])
    assert inspect_model(model).decoder == ("layers.0",)
