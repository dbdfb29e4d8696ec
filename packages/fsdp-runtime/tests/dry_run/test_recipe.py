"""A recipe lists the meshes of some GPUs, and its calls are those that were estimated."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Llama4TextConfig, LlamaConfig, Mamba2Config, MixtralConfig

import rl_logprobs
from fsdp_runtime import MeshSpec, cli
from fsdp_runtime.dry_run import Estimate, EstimateError, compare, recipe, sweep
from fsdp_runtime.dry_run.compare import rank_candidates
from fsdp_runtime.dry_run.recipe import Recipe, program, recipe_sections, recipes
from fsdp_runtime.dry_run.report.charts import charts_of
from fsdp_runtime.dry_run.report.html import html_report
from fsdp_runtime.dry_run.report.sections import estimate_sections, markdown_lines, sweep_sections, text_lines
from fsdp_runtime.dry_run.sweep_types import Candidate
from harness.estimates import GIB, made_estimate, made_settings
from harness.models import tiny_config, tiny_model
from harness.ranks import RankPool


def test_full_training_and_lora_of_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("Qwen3ForCausalLM", num_hidden_layers=1).to_dict()))
    asked = ["recipe", str(path), "--gpus", "2", "--device-memory", "80GiB", "--lengths", "64", "--workers", "0"]
    assert cli.main([*asked, "--every", "--markdown"]) == 0
    told = capsys.readouterr().out
    assert "## full, 64 tokens: 2 of 2 meshes fit" in told
    assert "## lora, 64 tokens: 2 of 2 meshes fit" in told
    assert "| tp=2, SP | yes |" in told
    assert "get_peft_model" in told


def test_a_recipe_stops_at_the_first_mesh_that_fits_and_where_the_state_is_too_large() -> None:
    config = tiny_config("Qwen3ForCausalLM")
    options: dict[str, Any] = {"lengths": (64,), "trainings": ("full",), "workers": 0}
    (fitting,) = recipes(config, 2, device_memory="80GiB", **options)
    assert [each.label for each in fitting.found.candidates] == ["dp_shard=2, block"]
    (large,) = recipes(config, 2, device_memory="100KiB", **options)
    assert [each.label for each in large.found.candidates] == ["dp_shard=2, block"]
    assert large.found.best is None


@pytest.mark.parametrize(
    ("memory", "tried", "best"),
    [(103, [1], 1), (53, [1, 2], 2), (28, [1, 4], 4), (16, [1, 8], 8), (15, [1, 8], 8), (8, [1], None)],
)
def test_meshes_that_cannot_fit_are_left_out(
    monkeypatch: pytest.MonkeyPatch, memory: int, tried: list[int], best: int | None
) -> None:
    def estimated(_model: object, mesh: MeshSpec, **_options: object) -> Estimate:
        """3 GiB of state, 100 that tp divides."""
        return made_estimate(peak=(3 + 100 // mesh.tp) * GIB, device_memory=memory * GIB)

    monkeypatch.setattr(compare, "estimate", estimated)
    options: dict[str, Any] = {"sequence_parallel": (True,), "activation_checkpointing": ("block",)}
    found = sweep("config.json", 8, dp_replicate=(1,), enough=1, workers=0, **options)
    assert sorted(each.mesh.tp for each in found.candidates) == tried
    assert (found.best and found.best.mesh.tp) == best


def test_long_sequences_are_tried_on_ranks_of_cp(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def answer(_model: object, gpus: int, **options: object) -> object:
        asked.append(options)
        return rank_candidates(gpus, [])

    monkeypatch.setattr(recipe, "sweep", answer)
    config = tiny_config("Qwen3ForCausalLM")
    recipes(config, 8, device_memory="80GiB", trainings=("full",))
    assert [(each["seq_len"], each["cp"], each["sequence_parallel"]) for each in asked] == [
        (length, cp, (True,)) for length, cp in ((8192, [1]), (32768, [1, 2]), (131072, [1, 2, 4, 8]))
    ]
    with pytest.raises(EstimateError, match="half"):
        recipes(config, 8, device_memory="80GiB", trainings=("half",))


@pytest.mark.parametrize(
    ("config", "gpus", "sizes"),
    [(MixtralConfig, 16, (8, 1)), (MixtralConfig, 12, (4, 1)), (MixtralConfig, 1, (1,)), (LlamaConfig, 16, (1,))],
)
def test_mixtures_are_tried_on_ranks_of_ep(
    monkeypatch: pytest.MonkeyPatch, config: Any, gpus: int, sizes: tuple[int, ...]
) -> None:
    asked: list[object] = []

    def answer(_model: object, gpus: int, *, ep: object, **_: object) -> object:
        asked.append(ep)
        return rank_candidates(gpus, [])

    monkeypatch.setattr(recipe, "sweep", answer)
    small = config(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=16)
    recipes(small, gpus, device_memory="80GiB", trainings=("full",), lengths=(8192,))
    assert asked == [sizes]


_LLAMA_4 = Llama4TextConfig(
    vocab_size=130,
    hidden_size=64,
    intermediate_size=64,
    intermediate_size_mlp=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=2,
)
_MAMBA_2 = Mamba2Config(
    vocab_size=130,
    hidden_size=64,
    num_hidden_layers=1,
    num_heads=4,
    head_dim=32,
    state_size=8,
    n_groups=1,
    chunk_size=16,
)


@pytest.mark.parametrize(
    ("config", "left"), [(_LLAMA_4, ["router"]), (_MAMBA_2, ["out_proj"])], ids=lambda each: type(each).__name__
)
def test_lora_leaves_layers_that_peft_does_not_adapt(config: Any, left: list[str]) -> None:
    (found,) = recipes(
        config, 2, device_memory="80GiB", trainings=("lora",), lengths=(64,), ep=(1,), workers=0, every=True
    )
    assert [each.error for each in found.found.candidates] == [""] * len(found.found.candidates)
    told = "\n".join(markdown_lines(recipe_sections([found])))
    assert f'target_modules="all-linear", exclude_modules={left}, task_type' in told


def test_what_does_not_fit_and_what_is_refused_is_listed() -> None:
    plain = Candidate(mesh=MeshSpec(dp_shard=8), sequence_parallel=False, activation_checkpointing="block")
    large = plain.with_estimate(
        made_estimate(peak=90 * GIB, device_memory=80 * GIB, settings=made_settings()), device_flops=None
    )
    refused = Candidate(
        mesh=MeshSpec(tp=8), sequence_parallel=True, activation_checkpointing="block", error="4 heads over 8 ranks"
    )
    sections = recipe_sections([Recipe(training="full", seq_len=8192, found=rank_candidates(8, [large, refused]))])
    told = "\n".join(markdown_lines(sections))
    assert "## full, 8,192 tokens: 0 of 2 meshes fit" in told
    assert "| dp_shard=8 | no |" in told
    assert "- refused: tp=8 (1 candidate): 4 heads over 8 ranks" in told
    assert "```" not in told


@pytest.mark.parametrize("training", ["full", "lora", "qlora"])
def test_program_of_a_recipe_is_python(training: str) -> None:
    candidate = Candidate(
        mesh=MeshSpec(dp_shard=2, tp=4, ep=2), sequence_parallel=True, activation_checkpointing="block"
    )
    call = "\n".join(program(training, candidate))
    ast.parse(call)
    assert "MeshSpec(dp_shard=2, tp=4, ep=2)" in call
    assert ("master_dtype" in call) == (training == "full")


def _losses_of_the_programs(printed: list[str], vocabulary: int) -> list[float]:
    """Run each printed program and two steps of its model."""
    losses: list[float] = []
    for text in printed:
        names: dict[str, Any] = {}
        exec(text, names)
        model, tokens = names["model"], torch.arange(3, 35).view(2, 16) % vocabulary
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        for _ in range(2):
            loss = -rl_logprobs.token_logprobs(model(tokens, use_cache=False).logits, tokens, shift=True).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_programs_of_a_recipe_run_as_printed_and_learn(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = tiny_model("Qwen3ForCausalLM", num_hidden_layers=1)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    asked = ["recipe", str(tmp_path), "--gpus", "2", "--device-memory", "80GB", "--lengths", "64", "--workers", "0"]
    assert cli.main([*asked, "--trainings", "full,lora,qlora", "--markdown"]) == 0
    printed = re.findall(r"```python\n(.*?)```", capsys.readouterr().out, re.DOTALL)
    assert len(printed) == 3
    assert 'steps=(Quantized("nf4"),)' in printed[2]
    for losses in two_ranks.run(_losses_of_the_programs, printed, model.config.vocab_size):
        assert losses[1] < losses[0]
        assert losses[3] < losses[2]
        assert losses[5] < losses[4]
        assert losses[2] == pytest.approx(losses[0], rel=1e-2)  # the adapters' initial values change nothing
        assert losses[4] == pytest.approx(losses[0], rel=2e-2)  # nf4 changes the base a little


def test_device_memory_is_the_same_number_in_every_report() -> None:
    live = made_estimate(peak=50 * GIB, device_memory=71 * GIB)
    alone = replace(live, memory=replace(live.memory, reserved=70 * GIB, constants={"context": 2 * GIB}))
    candidate = Candidate(mesh=MeshSpec(dp_shard=8), sequence_parallel=False, activation_checkpointing="block")
    found = rank_candidates(8, [candidate.with_estimate(alone, device_flops=None)])
    reports = {
        "estimate": estimate_sections(alone),
        "sweep": sweep_sections(found),
        "recipe": recipe_sections([Recipe(training="full", seq_len=8192, found=found)]),
    }
    for name, sections in reports.items():
        text = "\n".join(text_lines(sections))
        assert "72.0 GiB" in text, name
        assert ("device memory" in text) or name == "estimate"
        assert "50.0 GiB" not in text or name == "estimate", name
        assert ("no " in text) or ("Does not fit" in text), name
    assert alone.to_dict()["memory"]["device"] == 72 * GIB
    assert "72.0 GiB" in html_report(found)
    (chart, *_) = charts_of(found)
    assert sum(chart.bars[0][1].values()) == 72 * GIB
