"""GRPO with completions of a vLLM server: what it gets, against one process; run by ``nox -s trainers``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from trl.generation import vllm_generation

from harness.ranks import RankPool
from harness.trainers import Outcome, differences, dp_size, forget_accelerate, model_on, write_checkpoint
from harness.trl_trainers import build

#: What the server of this process got: prompts of each call, and the weights of each update.
_SERVED: dict[str, list[Any]] = {"prompts": [], "weights": []}


class FakeServer:
    """The calls of TRL's ``VLLMClient`` that trainers make; continues a prompt by its own tokens."""

    def __init__(self, **_: Any) -> None:
        self.base_url = "http://fake"

    def init_communicator(self, device: Any) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, announced: list[Any], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Check that tensors come as they were announced."""
        got = {}
        for (name, dtype, shape), (own, weight) in zip(announced, weights, strict=True):
            assert (name, dtype, shape) == (own, str(weight.dtype).removeprefix("torch."), list(weight.shape))
            got[own] = weight.detach().clone()
        _SERVED["weights"].append(got)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        _SERVED["prompts"].append(prompts)
        completions = [[(token * (3 + k)) % 120 + 4 for token in prompt] + [2] for prompt in prompts for k in range(n)]
        return {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "logprobs": [[[-1.0]] * len(ids) for ids in completions],
            "logprob_token_ids": [[[token] for token in ids] for ids in completions],
        }


def _run(folder: Path, output: Path, axes: dict[str, int] | None) -> tuple[Outcome, dict[str, list[Any]]]:
    forget_accelerate()
    for served in _SERVED.values():
        served.clear()
    model, mesh = model_on(folder, axes)
    with (
        mock.patch.object(vllm_generation, "is_vllm_available", return_value=True),
        mock.patch.object(vllm_generation, "VLLMClient", FakeServer),
    ):
        trainer = build(
            model, mesh, dp_size(axes), name="GRPO", output=str(output), use_vllm=True, vllm_mode="server", beta=0.0
        )
        trainer.train()
    return Outcome(trainer.state.log_history, {}, ""), {name: list(served) for name, served in _SERVED.items()}


@pytest.mark.parametrize("axes", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}], ids=str)
def test_a_server_gets_the_prompts_and_weights_of_one_process(
    four_ranks: RankPool, tmp_path: Path, axes: dict[str, int]
) -> None:
    folder = write_checkpoint(tmp_path / "in")
    ranks = four_ranks.run(_run, folder, tmp_path / "mesh", axes, timeout=400)
    expected, served = _run(folder, tmp_path / "alone", None)
    found, got = ranks[0]
    assert differences(found, expected, ("loss", "grad_norm", "reward")) == {}
    assert got["prompts"] == served["prompts"]
    assert len(got["weights"]) == len(served["weights"]) == 2  # one before each step
    for ours, theirs in zip(got["weights"], served["weights"], strict=True):
        assert set(ours) == set(theirs)
        assert all(torch.allclose(ours[name], weight, atol=2e-5) for name, weight in theirs.items())
    assert all(not other["prompts"] for _, other in ranks[1:])  # one rank asks
