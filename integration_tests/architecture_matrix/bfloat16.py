"""One architecture in bfloat16, with the parameters that its class keeps in float32, against one process.

Under FSDP2 both ranks get the same tokens, so that the mean of their gradients is each rank's own, and nothing may
differ by a single bit.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from architecture_matrix.measure import Refused
from architecture_matrix.outcome import Outcome, failure
from architecture_matrix.shrink import VOCAB
from architecture_matrix.table import coverage_entries, tiny_model
from fsdp_runtime import FSDPOptions, FsdpRuntimeError, parallelize
from harness.parity import largest, logits_of, mesh_for, own_part
from harness.ranks import RankPool, RanksFailed
from tp_plans import TpPlansError

BATCH, LENGTH = 3, 7


def measure_bfloat16(name: str) -> dict[str, list[str]]:
    """Return what is wrong on this rank, by way: nothing where it is right; every rank of two must call it."""
    entry = coverage_entries()[name]
    model = tiny_model(entry, dtype=torch.bfloat16)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    expected, gradients = _run(copy.deepcopy(model), ids)

    def with_fsdp(policy: MixedPrecisionPolicy) -> nn.Module:
        options = FSDPOptions(mp_policy=policy)
        return parallelize(copy.deepcopy(model), mesh_for({"dp_shard": 2}), fsdp=options, **entry.options)

    def equal(candidate: nn.Module) -> Iterator[str]:
        logits, found = _run(candidate, ids)
        if not torch.equal(logits, expected):
            yield f"logits off by {largest(logits.float() - expected.float()):.1e}"
        for path, parameter in candidate.named_parameters():
            wanted, actual = gradients[path], found[path]
            if wanted is None or actual is None:
                if wanted is not None or (actual is not None and largest(actual.to_local()) > 0):
                    yield f"{path}: a gradient where one process has none, or none"
                continue
            local = own_part(wanted, actual) if hasattr(actual, "placements") else wanted
            actual = actual.to_local() if hasattr(actual, "placements") else actual
            if actual.dtype != wanted.dtype or not torch.equal(local, actual):
                yield f"{path} ({parameter.dtype}): gradient off by {largest(local.float() - actual.float()):.1e}"

    same = MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "FSDP2": _problems(lambda: equal(with_fsdp(same[0]))),
        "FSDP2, policy": _problems(lambda: equal(with_fsdp(same[1]))),
    }


def bfloat16_outcome(pool: RankPool, name: str, *, timeout: float) -> Outcome:
    """Measure one architecture on the two ranks of a pool."""
    start = time.monotonic()
    try:
        ranks = pool.run(measure_bfloat16, name, timeout=timeout)
    except RanksFailed as failed:
        return failure(failed, time.monotonic() - start)
    found = dict.fromkeys(f"{way}: {each}" for ways in ranks for way, problems in ways.items() for each in problems)
    return Outcome("wrong" if found else "right", "; ".join([*found][:3]), seconds=time.monotonic() - start)


def _problems(check: Callable[[], Iterator[str]]) -> list[str]:
    try:
        return list(check())
    except (TpPlansError, FsdpRuntimeError) as error:
        raise Refused(str(error)) from error


def _run(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    logits = logits_of(model, {"input_ids": ids})
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits.dtype)
    (logits * weights).sum().backward()
    return logits.detach(), {path: parameter.grad for path, parameter in model.named_parameters()}
