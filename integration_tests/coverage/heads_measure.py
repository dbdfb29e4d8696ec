"""What one rank finds of one class in one way of parallelism: every output, the loss, and every gradient, to 1e-12."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from coverage.heads import KINDS, OTHER_HEADS, SPEECH_HEADS, HeadRow, head_inputs, head_model
from coverage.measure import MODES, Refused, default_dtype, gradient_errors, in_one_process
from coverage.outcome import Outcome, failure
from coverage.peers import NoPlanError
from fsdp_runtime import FsdpRuntimeError
from harness.float64 import compute_in_float64
from harness.parity import largest, mesh_for, ties
from harness.ranks import RankPool, RanksFailed
from tp_plans import TpPlansError

#: Of outputs, and of gradients relative to the tensor's largest element: rounding of float64.
BOUND = 1e-12
#: A gradient that vanishes mathematically is a sum of terms as large as others, and is compared with this share of
#: the largest of all.
FLOOR = 1e-3
#: The outputs that are compared, as far as a class has them.
OUTPUTS = (
    "logits",
    "start_logits",
    "end_logits",
    "last_hidden_state",
    "pooler_output",
    "encoder_last_hidden_state",
    "values",
    "loss",
)


@dataclass(frozen=True)
class Answer:
    """What a model makes of one kind of rows: its outputs and the gradients of every parameter."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def answer(model: nn.Module, inputs: Mapping[str, Any]) -> Answer:
    """Run a forward, and the backward of the loss, or of a weighted sum of all outputs where there is none."""
    model.zero_grad()
    found = model(**inputs)
    outputs = {name: _full(each) for name in OUTPUTS if isinstance(each := getattr(found, name, None), Tensor)}
    mask = inputs.get("attention_mask")
    total = outputs.get("loss")
    if total is None:
        total = torch.zeros((), dtype=torch.float64)
        for name, each in outputs.items():
            weights = torch.randn(each.shape, dtype=each.dtype, generator=torch.Generator().manual_seed(2))
            if mask is not None and mask.shape == each.shape[:2]:
                weights, outputs[name] = weights * mask.unsqueeze(-1), each * mask.unsqueeze(-1)
            total = total + (each * weights).sum()
    total.backward()
    gradients = {path: parameter.grad for path, parameter in model.named_parameters()}
    return Answer({name: each.detach() for name, each in outputs.items()}, gradients)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def errors(reference: nn.Module, candidate: nn.Module, wanted: Answer, found: Answer) -> dict[str, float]:
    """Return the error of each output and each gradient, infinite for what only one of the two has."""
    every: dict[str, float] = {}
    for name in wanted.outputs.keys() | found.outputs.keys():
        one, other = wanted.outputs.get(name), found.outputs.get(name)
        same = one is not None and other is not None and one.shape == other.shape
        every[name] = largest(one - other) / max(1.0, largest(one)) if same else float("inf")  # type: ignore[operator, arg-type]
    floor = FLOOR * max(largest(each) for each in wanted.gradients.values() if each is not None)
    every |= {
        f"gradient of {path}": e for path, e in gradient_errors(reference, candidate, wanted.gradients, floor=floor)
    }
    return every


def measure_head(row: HeadRow, mode: str, *, tp: int, **options: Any) -> dict[str, float]:
    """Return the errors of one class in one mode on this rank; every rank of the world must call it."""
    with default_dtype(torch.float64), compute_in_float64():
        reference = _model(row)
        candidate = copy.deepcopy(reference)
        try:
            if mode != "transformers" and row.head in OTHER_HEADS | SPEECH_HEADS:
                options = {"logits": "full", **options}  # the class computes a loss from them
            candidate = MODES[mode](candidate, mesh_for({"tp": tp}), **options)
        except (TpPlansError, FsdpRuntimeError, NoPlanError) as error:
            raise Refused(str(error)) from error
        if not any(isinstance(each, DTensor) for each in candidate.parameters()):
            raise Refused("the plan splits no parameter of this class")
        if ties(reference) != ties(candidate):
            return {"ties": float("inf")}
        worst: dict[str, float] = {}
        for kind, wanted in _answers(row).items():
            found = answer(candidate, head_inputs(reference, row, kind))
            for name, error in errors(reference, candidate, wanted, found).items():
                worst[name] = max(worst.get(name, 0.0), error)
        return worst


@lru_cache(maxsize=1)
def _model(row: HeadRow) -> nn.Module:
    return head_model(row)


@lru_cache(maxsize=1)
def _answers(row: HeadRow) -> dict[str, Answer]:
    """Return what one process makes of each kind of rows; computed only for what is not refused."""
    answers = {}
    for kind in KINDS:
        running = copy.deepcopy(_model(row))
        with in_one_process():
            found = answer(running, head_inputs(running, row, kind))
        # Some eager attention gives NaN for a row that is masked entirely, which would reach every gradient.
        if all(bool(each.isfinite().all()) for each in found.gradients.values() if each is not None):
            answers[kind] = found
    return answers


def evaluate_head(pool: RankPool, row: HeadRow, mode: str, *, timeout: float) -> Outcome:
    """Measure one class in one mode; failures of ranks become outcomes, too."""
    start = time.monotonic()
    try:
        ranks = pool.run(measure_head, row, mode, tp=pool.world_size, timeout=timeout)
    except RanksFailed as failed:
        return failure(failed, time.monotonic() - start)
    worst = {name: max(found.get(name, 0.0) for found in ranks) for found in ranks for name in found}
    wrong = {name: error for name, error in worst.items() if not error <= BOUND}
    note = "; ".join(f"{name} off by {error:.1e}" for name, error in [*wrong.items()][:4])
    return Outcome("wrong" if wrong else "right", note, seconds=time.monotonic() - start)
