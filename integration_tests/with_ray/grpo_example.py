"""The GRPO example as Ray actors, on this machine alone; run by ``nox -s ray``, whose environment has Ray."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

DRIVE = Path(__file__).parents[2] / "docs" / "examples" / "ray_grpo" / "drive.py"
SHORT = ("--warmup-steps=60", "--warmup-batch=128", "--steps=24", "--prompts=16", "--lr=1e-3")
QUICK = ("--held-out=64", "--report-every=1", "--score-every=12")

# A machine that is busy with other tests starts Ray's processes slower than Ray allows, and starves nice workers.
PATIENCE = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",
}

# Sums of float32 logits taken in another order, by a cache and by two halves of every layer, stay within this.
FLOAT32_ROUNDING = 5e-5


def drive(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example to its end, with a cluster of its own that no other may join."""
    alone = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    modules = os.pathsep.join(filter(None, sys.path))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, DRIVE, *arguments],
        env={**environment, **alone, **PATIENCE, "PYTHONPATH": modules},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output folder and the printed text of one run with two trainer ranks and a generator."""
    output = tmp_path_factory.mktemp("ray-grpo")
    job = drive(*SHORT, *QUICK, f"--output={output}")
    assert job.returncode == 0, job.stderr
    return output, job.stdout


def steps(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "metrics.json").read_text())["steps"]


def test_the_generator_ends_with_the_trainers_weights_bit_for_bit(finished: tuple[Path, str]) -> None:
    assert "24 of 24 weights are the same bit for bit in the trainer and the generator" in finished[1]


def test_trainer_and_generator_agree_on_every_sampled_token(finished: tuple[Path, str]) -> None:
    for step in steps(finished[0]):
        assert 0 < step["logprob_diff_mean"] <= step["logprob_diff_max"] < FLOAT32_ROUNDING


def test_the_reward_grows(finished: tuple[Path, str]) -> None:
    rewards = [step["reward"] for step in steps(finished[0])]
    assert len(rewards) == 24
    assert mean(rewards[-6:]) > mean(rewards[:6]) + 0.05


def test_the_tuned_checkpoint_is_an_ordinary_one_with_other_weights(finished: tuple[Path, str]) -> None:
    initial, tuned = (AutoModelForCausalLM.from_pretrained(finished[0] / name) for name in ("initial", "tuned"))
    before = initial.state_dict()
    assert all(not torch.equal(before[name], weight) for name, weight in tuned.state_dict().items())


def test_a_refusal_of_a_trainer_rank_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    job = drive("--warmup-steps=0", "--prompts=3", "--group=1", f"--output={tmp_path}")
    assert job.returncode != 0
    assert "ValueError: --prompts 3 times --group 1 makes 3 samples, which must divide by 2" in job.stderr
