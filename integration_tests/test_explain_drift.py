"""Each cause of drift, planted on a real mixture of experts, is attributed to itself with its size."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad

from fsdp_runtime import record_routes, replay_routes
from fsdp_runtime.steps import Routes
from harness.models import jitter
from rl_logprobs import SamplingFilter, explain_drift, next_token_targets, token_logprobs

VOCAB, BATCH, LENGTH, PADDING = 61, 4, 10, 3
IDS = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
IDS[:, :PADDING] = 0  # left padding
MASK = torch.arange(LENGTH).expand(BATCH, -1) >= PADDING
TARGETS = next_token_targets(IDS, attention_mask=MASK)

#: What the generator does otherwise than the trainer; keywords of ``_score``.
CANDIDATES: dict[str, dict[str, Any]] = {
    "kept tokens": {"top_p": 0.8},
    "routes": {"replay": True},
    "temperature": {"temperature": 0.7},
    "padding": {"padding": "masked"},
    "packing": {"rows": BATCH // 2},
    "vocabulary padding": {"vocabulary": 128},
    "dtype": {"dtype": torch.bfloat16},
    "stale weights": {"stale": True},
}


@cache
def _model(dtype: torch.dtype, stale: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    model.set_experts_implementation("eager")
    jitter(model, 0.2)
    if stale:  # some optimizer steps ago
        jitter(model, 0.02)
    return model.to(dtype)


@cache
def _routes() -> Routes:
    """What a generator with other kernels selects: the routes of a model with noise on its weights."""
    other = copy.deepcopy(_model(torch.float32, False))
    jitter(other, 0.1)
    with record_routes(other) as routes, torch.no_grad():
        other(input_ids=IDS, attention_mask=MASK.long(), use_cache=False)
    return routes


@cache
def _score(
    top_p: float = 1.0,
    replay: bool = False,
    temperature: float = 1.0,
    padding: str = "attended",
    rows: int = BATCH,
    vocabulary: int = VOCAB,
    dtype: torch.dtype = torch.float32,
    stale: bool = False,
) -> Tensor:
    model = _model(dtype, stale)
    inputs = {"input_ids": IDS.view(rows, -1), "attention_mask": MASK.long() if padding == "masked" else None}
    if rows < BATCH:  # several samples in a row, of which a later one reads those before it
        inputs |= {"attention_mask": _leaking_mask(rows, MASK if padding == "masked" else torch.ones_like(MASK))}
        inputs |= {"position_ids": torch.arange(LENGTH).repeat(rows, BATCH // rows)}
    with replay_routes(model, _routes() if replay else {}):
        logits = model(**inputs, use_cache=False).logits.float().view(BATCH, LENGTH, -1)
    logits = pad(logits, (0, vocabulary - VOCAB))  # rows of zeros in the head give logits of zero
    sampling = SamplingFilter(top_p=top_p) if top_p < 1 else None
    unfiltered = token_logprobs(logits, TARGETS, temperature=temperature)
    if sampling is None:
        return unfiltered
    filtered = token_logprobs(logits, TARGETS, temperature=temperature, sampling=sampling)
    return torch.where(filtered.isfinite(), filtered, unfiltered)  # a sampler keeps every token that it returns


def _leaking_mask(rows: int, real: Tensor) -> Tensor:
    """A causal mask ``[rows, 1, seq, seq]`` over all samples of a row, each of which should have been kept apart."""
    length = BATCH * LENGTH // rows
    seen = real.view(rows, 1, 1, length) | torch.eye(length, dtype=torch.bool)
    return seen & torch.ones(length, length, dtype=torch.bool).tril()


def _generator(*names: str) -> Tensor:
    return _score(**{key: value for name in names for key, value in CANDIDATES[name].items()})


@pytest.mark.parametrize(
    "names", [(), *((name,) for name in CANDIDATES), *itertools.combinations(CANDIDATES, 2)], ids=str
)
@torch.no_grad()
def test_planted_causes_are_found_and_nothing_else(names: tuple[str, ...]) -> None:
    real = MASK & (TARGETS >= 0)
    report = explain_drift(_generator(*names), _score, CANDIDATES, mask=real)
    assert set(report.found) == set(names), f"\n{report}"
    assert report.after.mean_absolute == 0.0
    for name in names:
        beside = _generator(*(other for other in names if other != name))
        moved = (_generator(*names) - beside)[real].double().abs().mean().item()
        assert report[name].moves == pytest.approx(moved, rel=1e-6)
        assert moved > 1e-4  # the plant is one
