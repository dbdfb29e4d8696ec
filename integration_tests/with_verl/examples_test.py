"""The scripts of docs/examples/verl with few steps; GRPO beside the engine of verl itself on the same tokens.

Runs with Ray take 5 GB and about a minute.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import pages

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES, GUIDE = DOCS / "examples" / "verl", DOCS / "guides" / "verl.md"


def _run(script: str, work: Path, *settings: str, engine: str = "fsdp_runtime", steps: int = 3) -> list[dict[str, Any]]:
    """Run a script; returns the metrics of each step."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "WORK": str(work), "ENGINE": engine, "STEPS": str(steps)}
    command = ["bash", str(EXAMPLES / f"{script}.sh"), *settings]
    job = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=900)
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-6000:]
    return [json.loads(line)["data"] for line in (work / f"{script}-{engine}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the scripts share."""
    return tmp_path_factory.mktemp("toy")


def _verl_commands() -> list[list[str]]:
    lines = [line for block in pages.blocks(GUIDE, "bash") for line in block.text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if "verl.trainer." in line]


def _values(steps: list[dict[str, Any]], metric: str) -> list[float]:
    return [step[metric] for step in steps if metric in step]


def test_sft_learns(work: Path) -> None:
    losses = _values(_run("sft", work, steps=8), "train/loss")
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 2


def test_grpo_equals_verls_own_engine_on_the_same_tokens(work: Path) -> None:
    ours, theirs = (_run("grpo", work, engine=engine) for engine in ("fsdp_runtime", "fsdp2"))
    assert _values(ours, "critic/score/mean") == _values(theirs, "critic/score/mean")
    assert _values(ours, "response_length/mean") == _values(theirs, "response_length/mean")
    for metric in ("actor/grad_norm", "actor/entropy"):
        assert _values(ours, metric) == pytest.approx(_values(theirs, metric), rel=1e-4)
    for steps in (ours, theirs):  # the rollout has the engine's weights after each update
        assert max(_values(steps, "training/rollout_probs_diff_max")) < 1e-6


def test_grpo_with_a_reference_in_small_dynamic_batches(work: Path) -> None:
    kl = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01")
    cut = tuple(
        f"actor_rollout_ref.{each}_max_token_len_per_gpu=100"
        for each in ("actor.ppo", "rollout.log_prob", "ref.log_prob")
    )
    steps = _run("grpo", work, *kl, *cut)
    divergence = _values(steps, "actor/kl_loss")
    assert divergence[0] == pytest.approx(0, abs=1e-5)
    assert divergence[-1] > 1e-4
    assert max(_values(steps, "training/rollout_probs_diff_max")) < 1e-6


def test_grpo_with_lora_sends_its_factors_and_is_its_own_reference(work: Path) -> None:
    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8")
    kl = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.optim.lr=1e-2")
    steps = _run("grpo", work, *lora, *kl, "actor_rollout_ref.model.target_modules=all-linear")
    divergence = _values(steps, "actor/kl_loss")
    assert divergence[0] == pytest.approx(0, abs=1e-5)  # the factors start as zero
    assert divergence[-1] > 1e-4
    assert max(_values(steps, "training/rollout_probs_diff_max")) < 1e-6


def test_the_rollout_takes_factors_and_scores_what_it_samples(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server by itself, without Ray."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(EXAMPLES))
    import hf_rollout
    import toy_task

    toy_task.write(work)
    path = str(work / "policy")
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), config)
    base = {
        name.removeprefix("base_model.model."): tensor
        for name, tensor in trained.state_dict().items()
        if ".lora_" not in name
    }
    server = hf_rollout.Server.__ray_metadata__.modified_class(path, 8)
    server.load_weights(base, 1, None)
    server.load_weights(get_peft_model_state_dict(trained), 2, trained.peft_config["default"].to_dict())

    async def answers() -> Any:
        prompts = ([2, 4, 12, 3], [2, 4, 12, 3], [4, 12, 3])
        return await asyncio.gather(*(server.generate("", prompt, {"temperature": 0.7}) for prompt in prompts))

    first, second, short = asyncio.run(answers())
    assert first.token_ids != second.token_ids
    for prompt, answer in (([2, 4, 12, 3], first), ([4, 12, 3], short)):
        tokens = torch.tensor([prompt + answer.token_ids])
        logits = trained(tokens).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer.token_ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="other weights than the model has"):
        server.load_weights(dict(list(base.items())[1:]), 3, None)


def test_ppo_trains_its_critic(work: Path) -> None:
    steps = _run("ppo", work, steps=4)
    losses = _values(steps, "critic/vf_loss")
    assert len(losses) == 4
    assert min(losses[1:]) < losses[0]
    assert all(norm > 0 for metric in ("actor/grad_norm", "critic/grad_norm") for norm in _values(steps, metric))


@pytest.mark.slow
def test_the_reward_of_grpo_rises(work: Path) -> None:
    rewards = _values(_run("grpo", work, steps=24), "critic/score/mean")
    assert len(rewards) == 24
    assert sum(rewards[-4:]) > 3 * sum(rewards[:4])


@pytest.mark.parametrize("words", _verl_commands(), ids=lambda words: " ".join(words)[-60:])
def test_commands_of_the_guide_are_configs_of_verl(words: list[str]) -> None:
    """Hydra finds every setting, and the engine takes its own."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    trains = "verl.trainer.sft_trainer" in words
    settings = [word for word in words if "=" in word]
    with initialize_config_module("verl.trainer.config", version_base=None):
        found = compose("sft_trainer_engine" if trains else "ppo_trainer", overrides=settings)
    engine = found.engine if trains else found.actor_rollout_ref.actor.fsdp_runtime
    own = omega_conf_to_dataclass(OmegaConf.create(OmegaConf.to_container(engine, resolve=True)))
    assert type(own).__name__ == "FsdpRuntimeEngineConfig"
    assert max(own.axes.resolve(16 if own.ep > 1 else 8).sizes.values()) > 1
