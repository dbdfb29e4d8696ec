"""Adapters and frozen parameters, as a dry run counts them."""

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
from fsdp_runtime.dry_run.build_model import WithAdapters
from fsdp_runtime.dry_run.parse_args import parse_fsdp
from harness.models import tiny_config

MASTER = parse_fsdp(master_dtype="fp32")


@cache
def run(*, adapted: bool = False, blocks: int = 1, **options: Any) -> Estimate:
    config = tiny_config("Qwen3ForCausalLM", num_hidden_layers=blocks)
    model = WithAdapters(config, rank=8) if adapted else config
    return estimate(model, {"dp_shard": 2}, **{"seq_len": 64, "fsdp": MASTER, **options})


def test_estimate_stores_frozen_parameters_in_their_dtype_and_gathers_in_another() -> None:
    narrow, wide = run(adapted=True), run(adapted=True, frozen_dtype="fp32")
    frozen = run(fsdp=None).memory.resident.parameters
    assert wide.memory.resident.parameters == narrow.memory.resident.parameters + frozen
    gathers = [sum(item.nbytes for item in e.traffic if item.kind == "all_gather") for e in (narrow, wide)]
    assert gathers[0] == gathers[1]


def test_parameters_that_stay_gathered_are_not_gathered_again_for_backward() -> None:
    freed, kept = run(blocks=2), run(blocks=2, fsdp=replace(MASTER, reshard_after_forward=False))
    gathers = [sum(item.count for item in e.traffic if item.kind == "all_gather") for e in (freed, kept)]
    assert gathers[1] < gathers[0]
    assert kept.memory.after_forward.gathered > freed.memory.after_forward.gathered


def test_a_frozen_dtype_needs_one_to_gather_in() -> None:
    with pytest.raises(EstimateError, match="give fsdp= with mp_policy="):
        run(adapted=True, fsdp=None, frozen_dtype=torch.float32)
    with pytest.raises(EstimateError, match="positive"):
        WithAdapters("config.json", rank=0)


def test_the_command_line_has_lora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("Qwen3ForCausalLM", num_hidden_layers=1).to_dict()))
    asked = ["estimate", str(path), "--mesh", "dp_shard=2", "--seq-len", "64", "--master-dtype", "fp32"]
    adapted = ["--lora", "8", "--frozen-dtype", "fp32", "--keep-gathered", "--json", "-"]
    assert cli.main([*asked, *adapted]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["memory"]["resident"]["parameters"] == run(adapted=True, frozen_dtype="fp32").memory.resident.parameters
    )
