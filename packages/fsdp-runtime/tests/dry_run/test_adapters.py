"""Adapters, frozen parameters and losses of other code, as a dry run counts them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_runtime import cli
from fsdp_runtime.dry_run import Estimate, EstimateError, estimate
from fsdp_runtime.dry_run.adapters import WithAdapters
from fsdp_runtime.dry_run.parse_args import parse_fsdp
from harness.models import tiny_config

MASTER = parse_fsdp(master_dtype="fp32")


@cache
def run(name: str = "Qwen3ForCausalLM", adapters: int = 0, blocks: int = 1, **options: Any) -> Estimate:
    config = tiny_config(name, num_hidden_layers=blocks)
    model = WithAdapters(config, rank=8, adapters=adapters) if adapters else config
    return estimate(model, {"dp_shard": 2}, **{"seq_len": 64, "fsdp": MASTER, **options})


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_adapters_that_compute_have_gradients_and_moments(name: str) -> None:
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


def test_adapters_of_experts_are_parameters_of_this_rank() -> None:
    config = tiny_config("Qwen3MoeForCausalLM", num_hidden_layers=1)
    of_a_layer = 8 * config.num_experts * 3 * (config.hidden_size + config.moe_intermediate_size)
    few, more = (run("Qwen3MoeForCausalLM", count).memory.resident.parameters for count in (2, 4))
    assert more - few > 2 * config.num_hidden_layers * of_a_layer * 4 // 2  # float32, over two ranks


def test_frozen_parameters_are_stored_in_their_own_dtype_and_gathered_in_the_compute_dtype() -> None:
    narrow, wide = run(adapters=2), run(adapters=2, frozen_dtype="fp32")
    frozen = run(fsdp=None).memory.resident.parameters
    assert wide.memory.resident.parameters == narrow.memory.resident.parameters + frozen
    gathers = [sum(item.nbytes for item in e.traffic if item.kind == "all_gather") for e in (narrow, wide)]
    assert gathers[0] == gathers[1]


def test_parameters_that_stay_gathered_are_not_gathered_again_for_backward() -> None:
    freed, kept = run(blocks=2), run(blocks=2, fsdp=replace(MASTER, reshard_after_forward=False))
    gathers = [sum(item.count for item in e.traffic if item.kind == "all_gather") for e in (freed, kept)]
    assert gathers[1] < gathers[0]
    assert kept.memory.after_forward.gathered > freed.memory.after_forward.gathered


def test_losses_of_logits_hold_as_many_copies_as_their_code() -> None:
    wide, narrow, fused = (
        max(peak.nbytes.logits for peak in run(seq_len=2048, logprobs=name).memory.phases)
        for name in ("transformers", "cross-entropy", "compiled")
    )
    assert wide > narrow >= fused > 0


def test_parts_of_the_vocabulary_stand_for_one_another() -> None:
    few, many = (run(logprobs=f"chunked-vocabulary:{rows}").flops for rows in (64, 8))
    assert few == many


def test_a_frozen_dtype_needs_one_to_gather_in() -> None:
    with pytest.raises(EstimateError, match="give fsdp= with mp_policy="):
        run(adapters=2, fsdp=None, frozen_dtype=torch.float32)
    with pytest.raises(EstimateError, match="positive"):
        WithAdapters("config.json", rank=0)


def test_the_command_line_has_lora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("Qwen3ForCausalLM", num_hidden_layers=1).to_dict()))
    asked = ["estimate", str(path), "--mesh", "dp_shard=2", "--seq-len", "64", "--master-dtype", "fp32"]
    several = ["--lora", "8", "--adapters", "2", "--frozen-dtype", "fp32", "--keep-gathered", "--json", "-"]
    assert cli.main([*asked, *several]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["resident"]["parameters"] == run(adapters=2, frozen_dtype="fp32").memory.resident.parameters
