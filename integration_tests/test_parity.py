"""Parallelized models against the single-process model: outputs and every gradient on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_runtime import FSDP2, parallelize
from harness.models import ARCHITECTURES, tiny_inputs, tiny_model
from harness.pairwise import alternating_first, pairwise_first
from harness.parity import Case, assert_parity, compare, mesh_for
from harness.ranks import RankPool

TP = {"tp": 2}
TP_FSDP = {"dp_shard": 2, "tp": 2}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
HSDP_TP = {"dp_replicate": 2, "tp": 2}
SP = {"sequence_parallel": True}


def identifier(value: Any) -> str:
    """A readable test id for a mesh or options."""
    if isinstance(value, dict):
        return "-".join(f"{key}={item}" for key, item in value.items()) or "default"
    return str(value)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, mesh: dict[str, int]) -> RankPool:
    """The world that fills the mesh of the test."""
    world = 1
    for size in mesh.values():
        world *= size
    return request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world])


@pytest.mark.parametrize(
    ("architecture", "mesh", "options", "tied"),
    pairwise_first(ARCHITECTURES, [TP, TP_FSDP, HSDP_TP], [{}, SP], [False, True], limit=5),
    ids=identifier,
)
def test_tensor_parallel_model_equals_single_process(
    ranks: RankPool, architecture: str, mesh: dict[str, int], options: dict[str, Any], tied: bool
) -> None:
    assert_parity(ranks.run(compare, Case(architecture, mesh, parallelize, options, {"tied": tied})))


@pytest.mark.parametrize(
    ("architecture", "mesh", "tied"),
    pairwise_first(["LlamaForCausalLM", "Gemma3ForConditionalGeneration"], [{"dp_shard": 2}, HSDP], [False, True]),
    ids=identifier,
)
def test_data_parallel_model_equals_single_process(
    ranks: RankPool, architecture: str, mesh: dict[str, int], tied: bool
) -> None:
    assert_parity(ranks.run(compare, Case(architecture, mesh, parallelize, {}, {"tied": tied})))


@pytest.mark.parametrize("length", [1, *(pytest.param(length, marks=pytest.mark.slow) for length in (2, 3, 8))])
@pytest.mark.parametrize("mesh", [{"tp": 4}], ids=identifier)
def test_sequence_parallel_takes_any_length(ranks: RankPool, mesh: dict[str, int], length: int) -> None:
    assert_parity(ranks.run(compare, Case("Qwen3ForCausalLM", mesh, parallelize, SP, {"tied": True}, length=length)))


@pytest.mark.parametrize(
    ("architecture", "padding"), alternating_first(["Qwen3ForCausalLM", "Gemma3ForCausalLM"], ["left", "right"])
)
@pytest.mark.parametrize("mesh", [TP_FSDP], ids=identifier)
def test_padding_masks_reach_sequence_parallel_attention(
    ranks: RankPool, architecture: str, mesh: dict[str, int], padding: str
) -> None:
    assert_parity(ranks.run(compare, Case(architecture, mesh, parallelize, SP, padding=padding)))


@pytest.mark.parametrize(
    ("inputs", "options"), alternating_first(["positions", "embeddings"], [{}, SP]), ids=identifier
)
@pytest.mark.parametrize("mesh", [TP], ids=identifier)
def test_position_ids_and_embeddings_may_be_given(
    ranks: RankPool, mesh: dict[str, int], options: dict[str, Any], inputs: str
) -> None:
    assert_parity(ranks.run(compare, Case("Gemma3ForCausalLM", mesh, parallelize, options, inputs=inputs)))


def _labelled_losses(options: dict[str, Any]) -> tuple[float, float]:
    """The loss that Hugging Face's own code computes, in one process and parallelized."""
    reference = tiny_model("Qwen3ForCausalLM")
    candidate = parallelize(copy.deepcopy(reference), mesh_for(TP), logits="full", **options)
    inputs = tiny_inputs(reference, batch=2, length=7)
    return tuple(model(**inputs, labels=inputs["input_ids"]).loss.item() for model in (reference, candidate))


@pytest.mark.parametrize("options", [{}, SP], ids=identifier)
def test_full_logits_give_the_hugging_face_loss(two_ranks: RankPool, options: dict[str, Any]) -> None:
    for expected, actual in two_ranks.run(_labelled_losses, options):
        assert actual == pytest.approx(expected, abs=1e-12)


OPTIONS: list[dict[str, Any]] = [
    {"activation_checkpointing": "block"},
    {"logits": "full"},
    {"fsdp": FSDP2(offload_policy=CPUOffloadPolicy())},
    {"fsdp": FSDP2(reshard_after_forward=False)},
]


@pytest.mark.parametrize(
    ("architecture", "options"),
    alternating_first(["Gemma3ForConditionalGeneration", "Qwen3ForCausalLM"], OPTIONS),
    ids=identifier,
)
@pytest.mark.parametrize("mesh", [TP_FSDP], ids=identifier)
def test_options_do_not_change_the_numbers(
    ranks: RankPool, architecture: str, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    assert_parity(ranks.run(compare, Case(architecture, mesh, parallelize, SP | options, {"tied": True})))


@pytest.mark.parametrize("mesh", [TP_FSDP], ids=identifier)
def test_a_model_in_float32_agrees_to_float32(ranks: RankPool, mesh: dict[str, int]) -> None:
    reports = ranks.run(compare, Case("LlamaForCausalLM", mesh, parallelize, SP, {"dtype": torch.float32}))
    assert_parity(reports)
