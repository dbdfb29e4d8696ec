"""The GRPO example with very few steps, as a user starts it: under torchrun on two ranks, and on four in slow tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.launched import launch
from harness.torchrun import torchrun

TRAIN = Path(__file__).parents[1] / "docs" / "examples" / "grpo" / "train.py"
SMALL = ("--warmup-batch=8", "--prompts=4", "--group=2", "--held-out=8", "--report-every=1")

# Sums of float32 logits taken in another order, by a cache and by two halves of every layer, stay within this.
FLOAT32_ROUNDING = 5e-5


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output folder and the printed text of one run on two tensor-parallel ranks, alone or times two with data."""
    output = tmp_path_factory.mktemp("grpo")
    steps = ("--warmup-steps=2", "--steps=2", "--score-every=1", "--top-p=0.9")
    job = torchrun(TRAIN, "--device=cpu", *SMALL, f"--output={output}", *steps, ranks=request.param, cwd=output)
    assert job.returncode == 0, job.stderr
    return output, job.stdout


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


def test_prints_one_row_a_step_and_every_score(finished: tuple[Path, str], request: pytest.FixtureRequest) -> None:
    _, printed = finished
    lines = printed.splitlines()
    header = next(index for index, line in enumerate(lines) if "reward" in line and "tokens/s" in line)
    assert [line.split()[0] for line in lines[header + 1 :] if line.split()[0].isdigit()] == ["1", "2"]
    assert sum("held-out exact match" in line for line in lines) == 4  # before, after the warm-up, and two steps
    shards = request.node.callspec.params["finished"] // 2
    assert f"dp_shard={shards}, tp=2, sequence parallelism on" in printed


def test_trainer_and_generator_agree_to_rounding(finished: tuple[Path, str]) -> None:
    steps = metrics(finished[0])["steps"]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert 0 < step["logprob_diff_mean"] <= step["logprob_diff_max"] < FLOAT32_ROUNDING
        assert math.isfinite(step["grad_norm"])
        assert step["tokens_per_second"] > 0


def test_reloaded_checkpoint_is_the_trained_policy(finished: tuple[Path, str]) -> None:
    figures = metrics(finished[0])
    assert figures["reloaded"]["logprob_diff"] < FLOAT32_ROUNDING
    assert figures["reloaded"]["greedy"] == pytest.approx(figures["scores"][-1]["greedy"], abs=1e-6)


def test_tuned_checkpoint_is_an_ordinary_one_with_other_weights(finished: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    initial, tuned = (AutoModelForCausalLM.from_pretrained(finished[0] / name) for name in ("initial", "tuned"))
    assert type(tuned) is type(initial)
    assert tuned.lm_head.weight is tuned.model.embed_tokens.weight
    before = initial.state_dict()
    assert all(not torch.equal(before[name], weight) for name, weight in tuned.state_dict().items())
    assert AutoTokenizer.from_pretrained(finished[0] / "tuned").eos_token_id == tuned.config.eos_token_id


def test_plot_is_a_png(finished: tuple[Path, str]) -> None:
    assert (finished[0] / "reward.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_mixture_replays_its_routes_and_explains_its_drift(tmp_path: Path) -> None:
    job = launch(
        TRAIN,
        "--device=cpu",
        *SMALL,
        f"--output={tmp_path}",
        *("--model=mixture", "--tp=1", "--ep=2", "--top-p=0.9", "--explain-drift", "--warmup-steps=0", "--steps=1"),
        ranks=2,
        cwd=tmp_path,
    )
    assert job.returncode == 0, job.stderr
    figures = metrics(tmp_path)
    assert figures["steps"][0]["logprob_diff_max"] < FLOAT32_ROUNDING
    assert "drift of" in job.stdout
    causes = {cause["name"]: cause for cause in figures["drift"]["causes"]}
    assert causes["kept tokens"]["step"] == 1
    assert causes["routes"]["step"] is None  # in float32 the trainer selects the same experts
    assert figures["drift"]["after"]["mean_absolute"] < FLOAT32_ROUNDING < figures["drift"]["before"]["mean_absolute"]


@pytest.mark.slow
def test_a_users_checkpoint_in_bfloat16_without_warmup(finished: tuple[Path, str], tmp_path: Path) -> None:
    job = launch(
        TRAIN,
        "--device=cpu",
        *SMALL,
        f"--model={finished[0] / 'tuned'}",
        f"--output={tmp_path}",
        "--warmup-steps=0",
        "--steps=1",
        "--dtype=bfloat16",
        "--activation-checkpointing",
        ranks=2,
        cwd=tmp_path,
    )
    assert job.returncode == 0, job.stderr
    figures = metrics(tmp_path)
    assert not (tmp_path / "initial").exists()
    assert len(figures["scores"]) == 2
    # Eight bits of mantissa on logits of a few units, summed in another order.
    assert figures["steps"][0]["logprob_diff_max"] < 0.2
    assert figures["steps"][0]["logprob_diff_mean"] < 0.02


def test_impossible_settings_end_the_job_with_the_reason(tmp_path: Path) -> None:
    job = launch(TRAIN, "--device=cpu", f"--output={tmp_path}", "--prompts=3", "--tp=1", ranks=2, cwd=tmp_path)
    assert job.returncode != 0
    assert "ValueError: --prompts 3 must divide by the 2 ranks that sample" in job.stderr
    assert not (tmp_path / "initial").exists()
