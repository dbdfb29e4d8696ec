"""Losses and adapters of published runs, as ``docs/generate/published_rows.py`` gives them to the dry run."""

from __future__ import annotations

import runpy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from fsdp_runtime.dry_run import Estimate, estimate
from fsdp_runtime.dry_run.build_model import model_builder
from fsdp_runtime.dry_run.parse_args import parse_fsdp
from harness.models import tiny_config

GENERATE = Path(__file__).parents[1] / "docs" / "generate"
published_loss = runpy.run_path(str(GENERATE / "published_losses.py"))["published_loss"]
with_several = runpy.run_path(str(GENERATE / "several_adapters.py"))["with_several"]

MASTER = parse_fsdp(master_dtype="fp32")


@cache
def run(name: str = "Qwen3ForCausalLM", adapters: int = 0, loss: str = "", **options: Any) -> Estimate:
    model: Any = tiny_config(name, num_hidden_layers=1)
    if adapters:
        model = partial(_adapted, model, adapters)
    if loss:
        options["logprobs"] = published_loss(loss)
    return estimate(model, {"dp_shard": 2}, **{"seq_len": 64, "fsdp": MASTER, **options})


def _adapted(config: Any, adapters: int) -> Any:
    return with_several(model_builder(config)(), 8, adapters)


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_with_several_gives_gradients_to_adapters_that_compute(name: str) -> None:
    plain = run(name, fsdp=None).memory.resident.parameters
    two, four = (run(name, count).memory for count in (2, 4))
    added = two.resident.parameters - plain
    assert added > 0
    assert four.resident.parameters - plain == 2 * added
    gradients = four.after_backward.gradients
    dense = gradients - two.after_backward.gradients  # of two adapters
    of_experts = (added - dense) // 2  # of one adapter, which computes
    assert (of_experts > 0) == (name == "Qwen3MoeForCausalLM")
    assert gradients == 2 * dense + of_experts
    steps = four.resident.optimizer_state - 2 * gradients
    assert 0 < steps < 0.05 * gradients


def test_with_several_divides_adapters_of_experts_over_ranks() -> None:
    config = tiny_config("Qwen3MoeForCausalLM", num_hidden_layers=1)
    of_a_layer = 8 * config.num_experts * 3 * (config.hidden_size + config.moe_intermediate_size)
    few, more = (run("Qwen3MoeForCausalLM", count).memory.resident.parameters for count in (2, 4))
    assert more - few > 2 * config.num_hidden_layers * of_a_layer * 4 // 2  # float32, over two ranks


@pytest.mark.parametrize("loss", ["transformers", "torchtitan", "chunked:4", "chunked-vocabulary:128", "fused-linear"])
def test_published_loss_holds_copies_as_its_code_does(loss: str) -> None:
    memory = run(loss=loss, seq_len=2048).memory
    float32_logits = 2048 * tiny_config("Qwen3ForCausalLM").vocab_size * 4
    copies = (memory.peak.nbytes.logits + memory.peak.nbytes.temporaries) / float32_logits
    assert memory.after_backward.gradients > 0
    assert copies > 2 if loss in ("transformers", "torchtitan") else copies < 6


def test_published_losses_of_logits_differ_in_copies() -> None:
    names = ("transformers", "cross-entropy", "compiled")
    wide, narrow, fused = (run(seq_len=2048, loss=name).memory.phases[0].total for name in names)
    assert wide > narrow >= fused > 0


def test_published_loss_counts_every_part_of_the_vocabulary() -> None:
    few, many = (run(loss=f"chunked-vocabulary:{rows}").flops for rows in (64, 8))
    assert few == many
