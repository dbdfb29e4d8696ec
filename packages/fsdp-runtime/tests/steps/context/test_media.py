"""Images and videos under context parallelism: outputs and gradients are those of one process, or it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from coverage.multimodal import multimodal_model
from coverage.multimodal_inputs import multimodal_inputs
from fsdp_runtime import MeshSpec, parallelize, sequence_layout
from fsdp_runtime.steps import ContextAttention
from fsdp_runtime.steps.context.step import replace_attention
from harness.float64 import compute_in_float64
from harness.parity import gradient_errors, largest, mesh_for
from harness.ranks import RankPool

ASKED = {"use_cache": False}


def _batch(model: Any, media: str, length: int = 4) -> tuple[dict[str, Any], dict[str, Any]]:
    """Token ids with positions, whose length is a multiple, and the media of full rows."""
    inputs = multimodal_inputs(model, media=media)
    ids, kinds = inputs.pop("input_ids"), inputs.pop("mm_token_type_ids", None)
    extra = -ids.shape[1] % length
    ids = nn.functional.pad(ids, (0, extra), value=5)
    tokens = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand(ids.shape)}
    if hasattr(model.base_model, "get_rope_index"):
        grids = {name: value for name, value in inputs.items() if name.endswith("_grid_thw")}
        kinds = nn.functional.pad(kinds, (0, extra))
        tokens["position_ids"] = model.base_model.get_rope_index(ids, mm_token_type_ids=kinds, **grids)[0]
    return tokens, inputs


def errors(kind: str, media: str, axes: dict[str, int], **options: Any) -> tuple[float, float]:
    """Errors of this rank's logits, and of all gradients."""
    with compute_in_float64():
        reference: Any = multimodal_model(kind)
        tokens, inputs = _batch(reference, media, 4 * axes.get("cp", 1))
        expected = reference(**tokens, **inputs, **ASKED).logits
        weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
        (expected * weights).sum().backward()
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        mesh = mesh_for(axes)
        model = parallelize(copy.deepcopy(reference), mesh, logits="full", **options)
        model.zero_grad()
        layout = sequence_layout(mesh, expected.shape[1])
        logits = model(**layout.shard_batch(tokens), **inputs, **ASKED).logits
        (logits * layout.shard(weights)).sum().backward()
        return largest(logits - layout.shard(expected)), max(gradient_errors(gradients, model).values())


@pytest.mark.parametrize(
    ("kind", "media"),
    [("qwen2_5_vl", "image"), ("qwen3_vl", "image"), ("qwen3_vl", "video"), ("llava", "image"), ("internvl", "image")],
)
def test_a_model_with_media_is_that_of_one_process(kind: str, media: str, two_ranks: RankPool) -> None:
    for output, gradient in two_ranks.run(errors, kind, media, {"cp": 2}):
        assert output < 1e-8
        assert gradient < 1e-6


def _text_error(kind: str) -> float:
    """The error of this rank's logits of text alone, with the token types that a processor gives."""
    with compute_in_float64():
        reference: Any = multimodal_model(kind)
        inputs = {"input_ids": torch.arange(3, 11)[None], "mm_token_type_ids": torch.zeros(1, 8, dtype=torch.int64)}
        expected = reference(**inputs, **ASKED).logits
        mesh = mesh_for({"cp": 2})
        model = parallelize(copy.deepcopy(reference), mesh, logits="full")
        layout = sequence_layout(mesh, 8)
        own = {name: layout.shard(value) for name, value in inputs.items()}
        return max(
            largest(model(**{**own, "mm_token_type_ids": kinds}, **ASKED).logits - layout.shard(expected))
            for kinds in (own["mm_token_type_ids"], inputs["mm_token_type_ids"])
        )


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_token_types_of_text_change_nothing(kind: str, two_ranks: RankPool) -> None:
    assert max(two_ranks.run(_text_error, kind)) < 1e-8


def test_media_beside_tensor_and_sequence_parallelism(four_ranks: RankPool) -> None:
    axes = {"cp": 2, "tp": 2}
    for output, gradient in four_ranks.run(errors, "qwen3_vl", "image", axes, sequence_parallel=True):
        assert output < 1e-8
        assert gradient < 1e-6


def test_arguments_of_towers_without_media_change_nothing() -> None:
    model: Any = multimodal_model("llava")
    ids = torch.arange(3, 11)[None]
    with compute_in_float64():
        expected = model(ids, **ASKED).logits
        replace_attention(model, ContextAttention(MeshSpec().build(device_type="cpu").get_group("cp"), "headtail"))
        torch.testing.assert_close(model(input_ids=ids, vision_feature_layer=-1, **ASKED).logits, expected)
