"""A dry run traces a few tiles of a loss, whatever the number of tokens, with the numbers of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_runtime.dry_run import Estimate, estimate, losses
from fsdp_runtime.dry_run.trace.recorder import Recorder
from rl_logprobs.softmax import fused_linear, row_blocks

WIDTH, VOCABULARY = 16, 120


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH))])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.lm_head(hidden)


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.requires_grad_(False)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPU_TILE", "ACCELERATOR_TILE"):
        monkeypatch.setattr(fused_linear, name, (8, 32))
    monkeypatch.setattr(row_blocks, "ACCELERATOR_WORKSPACE", 64)


def run(model: Any, **options: Any) -> Estimate:
    return estimate(model, {"dp_shard": 2}, **{"plan": None, "clip": False, "optimizer": "none", **options})


def numbers(found: Estimate) -> Any:
    return found.memory, found.traffic, found.flops


@contextmanager
def all_tiles() -> Iterator[None]:
    yield


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("model", "logprobs", "shape"),
    [
        (Model, "linear", {"seq_len": 11, "micro_batch": 3}),
        pytest.param(Model, "linear", {"seq_len": 60}, marks=pytest.mark.slow),
        pytest.param(Frozen, "linear", {"seq_len": 33}, marks=pytest.mark.slow),
        pytest.param(Frozen, "linear", {"seq_len": 60}, marks=pytest.mark.slow),
        (Model, "logits", {"seq_len": 11, "micro_batch": 3}),
    ],
)
def test_a_few_tiles_have_the_memory_and_the_work_of_all(
    model: Any, logprobs: str, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = run(model, logprobs=logprobs, **shape)
    monkeypatch.setattr(row_blocks, "represent_tiles", all_tiles)
    assert numbers(few) == numbers(run(model, logprobs=logprobs, **shape))


@pytest.fixture
def traced_operators(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that makes an estimate and returns the number of operators that it traced."""
    calls = 0
    dispatch = Recorder.__torch_dispatch__

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return dispatch(*args, **kwargs)

    def traced(model: Any, **options: Any) -> int:
        nonlocal calls
        calls = 0
        run(model, **options)
        return calls

    monkeypatch.setattr(Recorder, "__torch_dispatch__", counted)
    return traced


@pytest.mark.parametrize("logprobs", ["linear", "logits"])
def test_as_many_operators_are_traced_for_a_million_tokens_as_for_a_few_tiles(
    logprobs: str, traced_operators: Callable[..., int]
) -> None:
    half, full = (traced_operators(Model, logprobs=logprobs, seq_len=tokens) for tokens in (2**19, 2**20))
    assert half == full < 2000


def test_the_norm_of_large_gradients_takes_a_few_operators(traced_operators: Callable[..., int]) -> None:
    without, clipped = (traced_operators(lambda: wide(2**22), seq_len=8, clip=clip) for clip in (False, True))
    assert 0 < clipped - without < 50


def test_a_tile_has_the_size_and_the_operands_that_it_has_on_an_accelerator() -> None:
    tokens, columns = fused_linear.ACCELERATOR_TILE
    peak = run(lambda: wide(columns), logprobs="linear", seq_len=tokens).memory.peak.nbytes
    tile = tokens * columns * 4
    assert tile < peak.total < 3 * tile


def test_losses_hold_the_tensors_of_the_chosen_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    temporaries = {}
    for backend in ("", "torch"):  # Triton's kernels by default
        monkeypatch.setenv("RL_LOGPROBS_BACKEND", backend)
        peaks = {each.phase: each for each in run(lambda: wide(2**13), logprobs="logits", seq_len=4096).memory.phases}
        temporaries[backend] = peaks["loss"].total - peaks["forward"].total
        assert peaks["backward"].nbytes.logits >= 2 * 4096 * 2**13 * 2
    assert temporaries[""] < 4096 * 2**13 * 2 // 10 < temporaries["torch"]


def wide(vocabulary: int) -> nn.Module:
    model = Model().to(torch.bfloat16)
    model.embedding = nn.Embedding(vocabulary, WIDTH)
    model.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
    return model


class Scaled(Model):
    """Keeps its logits within a bound, as Gemma does, in its own code."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.tanh(super().forward(input_ids) / 30) * 30


def test_the_loss_of_hidden_states_runs_inside_the_forward_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[nn.Module] = []
    real = losses.forward_with_lm_head

    def counted(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(model)
        return real(model, *args, **kwargs)

    monkeypatch.setattr(losses, "forward_with_lm_head", counted)
    found = run(Scaled, logprobs="linear", seq_len=60)
    assert called
    logits = run(Scaled, logprobs="logits", seq_len=60)
    assert gathered(found) == gathered(logits) != {}


def gathered(found: Estimate) -> dict[tuple[str, str], int]:
    return {(each.phase, each.kind): each.nbytes for each in found.traffic if each.axis == "dp_shard"}
