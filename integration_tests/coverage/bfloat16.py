"""One architecture in bfloat16, with the parameters that its class keeps in float32, against one process.

Under FSDP2 both ranks get the same tokens, so that the mean of their gradients is each rank's own, and nothing may
differ by a single bit.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from coverage.measure import Refused, default_dtype
from coverage.outcome import Outcome, failure
from coverage.shrink import VOCAB
from coverage.table import coverage_entries, tiny_model
from fsdp_runtime import FSDP2, FsdpRuntimeError, parallelize
from harness.float64 import compute_in_float64
from harness.parity import largest, logits_of, mesh_for, own_part
from harness.ranks import RankPool, RanksFailed
from tp_plans import TpPlansError

BATCH, LENGTH = 3, 7
#: A model that adds one tensor to several streams sums its gradients in bfloat16, and FSDP2 changes their order.
ROUNDING = 2**-7
#: One whose blocks all read the states of all blocks before has longer sums.  What is rounded there is measured: it is
#: how far one process is from float64, up to this error, beyond which it may have taken other experts.
LARGEST_ROUNDING = 8 * ROUNDING


@dataclass(frozen=True)
class Differences:
    """What differs from one process on a rank.

    Args:
        wrong: what is off by more than one rounding of bfloat16, of the tensor's largest element.
        rounded: what is not equal bit for bit.
    """

    wrong: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()


def measure_bfloat16(name: str) -> dict[str, Differences]:
    """Return the differences on this rank, by way; every rank of two must call it."""
    entry = coverage_entries()[name]
    model = tiny_model(entry, dtype=torch.bfloat16)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    try:
        expected, gradients = _run(copy.deepcopy(model), ids)
    except RuntimeError as error:
        raise Refused(f"one process cannot run it in bfloat16: {error}") from error

    def differences(policy: MixedPrecisionPolicy) -> Differences:
        options = FSDP2(mp_policy=policy)
        try:
            candidate = parallelize(copy.deepcopy(model), mesh_for({"dp_shard": 2}), fsdp=options, **entry.options)
        except (TpPlansError, FsdpRuntimeError) as error:
            raise Refused(str(error)) from error
        logits, found = _run(candidate, ids)
        errors = {"the logits": _error(expected, logits)}
        errors |= {path: _error(gradients[path], found[path]) for path in found}
        bounds = dict.fromkeys(errors, ROUNDING)
        if any(not error <= ROUNDING for error in errors.values()) and errors["the logits"] == 0:
            bounds |= _rounded_in_one_process(model, ids, gradients)
        off = [f"{path} off by {error:.1e}" for path, error in errors.items() if not error <= bounds[path]]
        return Differences(tuple(off), tuple(path for path, error in errors.items() if 0 < error <= bounds[path]))

    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    return {"FSDP2": differences(MixedPrecisionPolicy()), "FSDP2 with a policy": differences(policy)}


def _rounded_in_one_process(model: nn.Module, ids: Tensor, gradients: dict[str, Tensor | None]) -> dict[str, float]:
    """Return the bound of each gradient: how far that of one process is from float64, within limits."""
    with default_dtype(torch.float64), compute_in_float64():
        _, exact = _run(copy.deepcopy(model).double(), ids)
    found = {path: (exact[path], gradient) for path, gradient in gradients.items() if gradient is not None}
    errors = {path: _error(one, other.double()) for path, (one, other) in found.items()}
    return {path: min(max(error, ROUNDING), LARGEST_ROUNDING) for path, error in errors.items()}


def _error(wanted: Tensor | None, actual: Tensor | None) -> float:
    """Return the largest error of this rank's part, of the largest element; infinite for another dtype."""
    if wanted is None or actual is None:
        local = actual.to_local() if isinstance(actual, DTensor) else actual
        return 0.0 if wanted is None and (local is None or largest(local) == 0) else float("inf")
    part = own_part(wanted, actual) if isinstance(actual, DTensor) else wanted
    local = actual.to_local() if isinstance(actual, DTensor) else actual
    if local.dtype != wanted.dtype:
        return float("inf")
    return largest(local.double() - part.double()) / max(largest(wanted.double()), 1e-30)


def bfloat16_outcome(pool: RankPool, name: str, *, timeout: float) -> Outcome:
    """Measure one architecture on the two ranks of a pool."""
    start = time.monotonic()
    try:
        ranks = pool.run(measure_bfloat16, name, timeout=timeout)
    except RanksFailed as failed:
        return failure(failed, time.monotonic() - start)
    found = [(way, each) for ways in ranks for way, each in ways.items()]
    wrong = dict.fromkeys(f"{way}: {text}" for way, each in found for text in each.wrong)
    rounded = dict.fromkeys(path for _, each in found for path in each.rounded)
    note = "; ".join([*wrong][:3]) or (f"equal to a rounding: {', '.join([*rounded][:3])}" if rounded else "")
    return Outcome("wrong" if wrong else "right", note, seconds=time.monotonic() - start)


def _run(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    logits = logits_of(model, {"input_ids": ids})
    weights = torch.randn(logits.shape, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2))
    (logits * weights.to(logits.dtype)).sum().backward()
    return logits.detach(), {path: parameter.grad for path, parameter in model.named_parameters()}
