"""What is tried with a server, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_runtime
import fsdp_runtime.sync
import rl_logprobs
from vllm_gloo import EngineClient, EngineSync, EngineSyncReport

#: Two forwards in float32 that sum in other orders.
FLOAT32_ROUNDING = 1e-5
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [200, 301, 306, 4, 250]]
NEW_TOKENS = 12


@dataclass(frozen=True)
class Row:
    """One update of one engine.

    Args:
        model: the family.
        trainer: the trainer's mesh.
        engine: the engine's mesh.
        update: counted from 1.
        report: what it took.
        greedy: whether the engine's greedy tokens are the trainer's most probable ones.
        difference: the largest difference of their log-probabilities, in nats.
    """

    model: str
    trainer: str
    engine: str
    update: int
    report: EngineSyncReport
    greedy: bool
    difference: float

    HEAD = "model        trainer    engine update  sync s of it load s largest difference  greedy"

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words."""
        wrong = [] if self.greedy else ["greedy tokens are not the trainer's"]
        if not self.difference <= FLOAT32_ROUNDING:
            wrong.append(f"log-probabilities differ by {self.difference:.1e}")
        return wrong

    def __str__(self) -> str:
        report = self.report
        return (
            f"{self.model:12} {self.trainer:10} {self.engine:6} {self.update:6} {report.seconds:7.2f} "
            f"{report.apply_s:12.2f} {self.difference:18.1e}  {'equal' if self.greedy else 'DIFFERENT'}"
        )


Generated = tuple[list[list[int]], list[list[float]]]


def ask(client: EngineClient) -> Generated:
    """The engine's greedy tokens after every prompt and their log-probabilities."""
    request = {"model": "policy", "prompt": PROMPTS, "max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": 1}
    answer = client.request("/v1/completions", {**request, "return_token_ids": True, "ignore_eos": True})
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [c["token_ids"] for c in choices], [c["logprobs"]["token_logprobs"] for c in choices]


def generate(client: EngineClient | None) -> Generated:
    """What :func:`ask` returns, on every rank."""
    found: list[Any] = [None if client is None else ask(client)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def compare(model: nn.Module, client: EngineClient | None) -> tuple[bool, float]:
    """Whether the engine's greedy tokens are the model's, and the largest difference of log-probabilities."""
    return differences(model, generate(client))


@torch.no_grad()
def differences(model: nn.Module, generated: Generated) -> tuple[bool, float]:
    """Whether greedy tokens are the model's, and the largest difference of log-probabilities."""
    equal, worst = True, 0.0
    for prompt, ids, logprobs in zip(PROMPTS, *generated, strict=True):
        logits = model(torch.tensor([prompt + ids[:-1]])).logits[:, len(prompt) - 1 :].float()
        scored = rl_logprobs.token_logprobs(logits, torch.tensor([ids]))[0]
        worst = max(worst, (scored - torch.tensor(logprobs)).abs().max().item())
        # A tie within rounding is no difference: the chosen token must be as probable as the most probable one.
        best = logits.log_softmax(-1).max(-1).values[0]
        equal = equal and bool((best - scored <= FLOAT32_ROUNDING).all())
    return equal, worst


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Change every parameter by an optimizer's step.

    Raises:
        RuntimeError: one is as it was, as where the optimizer has parameters that FSDP2 gathered for a forward.
    """
    before = fsdp_runtime.sync.digest(model)
    tokens = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(seed))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    same = [name for name, number in fsdp_runtime.sync.digest(model).items() if number == before[name]]
    if same:
        raise RuntimeError(f"training changed nothing in {len(same)} of {len(before)} weights, first {same[0]}")


def updates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: EngineSync,
    client: EngineClient | None,
    names: Sequence[str],
    versions: Callable[[], str],
) -> list[Row]:
    """Two updates with other weights, each compared."""
    rows = []
    for number in (1, 2):
        if number == 2:
            train(model, optimizer, seed=number)
        report = sync.update(versions())
        rows.append(Row(*names, number, report, *compare(model, client)))  # type: ignore[misc]
    return rows


def bounded(call: Callable[[], Any]) -> tuple[str | None, float]:
    """The message of the error that a call raises, and the seconds until then."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return None, time.monotonic() - start
