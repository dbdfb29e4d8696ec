"""The result of one changed config on one rank."""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from combinations.fields import FieldCase
from combinations.scenario import ALONE, FAILED, REFUSED, RIGHT, Result
from coverage.measure import MODES, Run, compared, default_dtype, run_alone
from coverage.table import coverage_entries, tiny_model
from fsdp_runtime import FsdpRuntimeError
from harness.float64 import compute_in_float64
from harness.parity import largest, logits_of, mesh_for
from tp_plans import TpPlansError

KINDS = ("ids", "left padding")
BOUND = 1e-7
#: Gradients are relative to no less than 1e-9 of the model's largest: of one that vanishes mathematically, as a key's
#: where attention sees one token, what float64's rounding leaves is 2e-16 / 1e-9 and some.
GRADIENT_BOUND = 1e-6


def measure_change(case: FieldCase) -> Result:
    """Measure one row with a changed field of its config on two ranks; both must call it."""
    entry = coverage_entries()[case.name]
    entry = replace(entry, changes={**entry.changes, **case.change})
    dtype = torch.float64 if entry.default_float64 else torch.float32
    with default_dtype(dtype), compute_in_float64(), _without_warnings():
        try:
            reference = tiny_model(entry)
            runs = run_alone(reference, KINDS)
        except Exception as error:
            return Result(ALONE, f"{type(error).__name__}: {error}")
        if not runs or not all(bool(run.expected.isfinite().all()) for run in runs.values()):
            return Result(ALONE, "it computes no finite numbers")
        try:
            return _compared(reference, runs, case.mode, entry.options)
        except Exception:
            return Result(FAILED, traceback.format_exc(limit=-3))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Let the packages log errors alone: each case would warn of what it leaves replicated."""
    loggers = [logging.getLogger(package) for package in ("tp_plans", "fsdp_runtime")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _compared(reference: nn.Module, runs: dict[str, Run], mode: str, options: Mapping[str, Any]) -> Result:
    model = copy.deepcopy(reference)
    try:
        candidate = MODES[mode](model, mesh_for({"tp": 2}), **options)
    except (TpPlansError, FsdpRuntimeError) as error:
        changed = _differences(model, runs)
        return Result(FAILED, f"changed before it was refused: {changed}") if changed else Result(REFUSED, str(error))
    comparison = compared(reference, candidate, runs)
    outputs = {f"outputs, {kind}": error for kind, error in comparison.output_errors.items()}
    wrong = [
        f"{what} off by {error:.1e}"
        for errors, bound in ((outputs, BOUND), (comparison.gradient_errors, GRADIENT_BOUND))
        for what, error in errors.items()
        if not error <= bound
    ]
    problems = [*wrong, *comparison.problems]
    return Result(FAILED, "; ".join(problems[:6])) if problems else Result(RIGHT)


def _differences(model: nn.Module, runs: Mapping[str, Run]) -> list[str]:
    """Return the differences of a refused model from the reference."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return ["parameters are sharded"]
    off = {kind: largest(logits_of(model, run.inputs) - run.expected) for kind, run in runs.items()}
    return [f"outputs, {kind}, off by {error:.1e}" for kind, error in off.items() if error]
