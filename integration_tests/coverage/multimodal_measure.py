"""What one rank finds of one multimodal model with media in its rows: outputs, gradients, how much is split."""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from coverage.measure import MODES, RankResult, Refused, Run, compared, default_dtype, in_one_process
from coverage.multimodal import DEFAULT_FLOAT64, multimodal_model
from coverage.multimodal_inputs import multimodal_inputs
from coverage.outcome import ROUNDED, Outcome, failure, summarize
from coverage.peers import NoPlanError
from fsdp_runtime import FsdpRuntimeError, parallelize
from harness.float64 import compute_in_float64
from harness.parity import logits_of, mesh_for
from harness.ranks import RankPool, RanksFailed
from tp_plans import TpPlansError

#: The ways of measuring: those of decoders, and with a plan whose doubts are accepted.
_MODES = {**MODES, "inferred": partial(parallelize, plan="inferred")}


def evaluate_multimodal(pool: RankPool, model_type: str, mode: str, *, media: str, timeout: float) -> Outcome:
    """Measure one model type in one mode with media of one kind; failures of ranks become outcomes, too.

    What is wrong is measured again with all of the model's code in float64, as in :func:`outcome.evaluate`.
    """
    start, tp = time.monotonic(), pool.world_size

    def measured(*, float64: bool) -> Outcome:
        results = pool.run(measure_multimodal, model_type, mode, tp=tp, media=media, float64=float64, timeout=timeout)
        return summarize(results, time.monotonic() - start)

    try:
        found = measured(float64=False)
        again = measured(float64=True) if found.status == "wrong" else found
    except RanksFailed as failed:
        return failure(failed, time.monotonic() - start)
    return replace(again, note=f"{ROUNDED} {found.note}") if again.status != found.status else found


def measure_multimodal(
    model_type: str, mode: str, *, tp: int, media: str = "image", float64: bool = False, **options: Any
) -> RankResult:
    """Measure one model type in one of the modes on this rank; every rank of the world must call it."""
    default = torch.float64 if float64 or model_type in DEFAULT_FLOAT64 else torch.float32
    with default_dtype(default), compute_in_float64() if float64 else nullcontext():
        return _measure(model_type, mode, tp, media, float64, options)


def _measure(model_type: str, mode: str, tp: int, media: str, float64: bool, options: dict[str, Any]) -> RankResult:
    reference, runs = _reference(model_type, media, float64)
    candidate = copy.deepcopy(reference)
    try:
        candidate = _MODES[mode](candidate, mesh_for({"tp": tp}), **options)
    except (TpPlansError, FsdpRuntimeError, NoPlanError) as error:
        raise Refused(str(error)) from error
    return compared(reference, candidate, runs)


@lru_cache(maxsize=1)
def _reference(model_type: str, media: str, _: bool) -> tuple[nn.Module, dict[str, Run]]:
    model = multimodal_model(model_type)
    inputs = multimodal_inputs(model, media=media)
    with in_one_process():
        expected = logits_of(model, inputs)
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
    (expected * weights).sum().backward()
    gradients = {path: parameter.grad for path, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return model, {media: Run(inputs, weights, expected.detach(), gradients)}
