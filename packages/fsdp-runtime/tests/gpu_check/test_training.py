"""The checks of runs, routes, weights and offload pass on two ranks, and find planted faults."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime.gpu_check import training
from fsdp_runtime.gpu_check.machine import World
from fsdp_runtime.gpu_check.ranks import NotRun
from harness.ranks import RankPool

CPU = torch.device("cpu")
CHECKS = {
    "steps": partial(training.check_steps, {"tp": 2}),
    "routes": training.check_routes,
    "weights": training.check_weights,
    "offload": training.check_offload,
}


def _states(name: str) -> list[str]:
    training.STEPS = 4
    return [result.state for result in CHECKS[name](World("cpu", 2, 2), CPU)]


@pytest.mark.parametrize(("name", "number"), [("steps", 1), ("routes", 2), ("weights", 2), ("offload", 1)])
def test_checks_pass_on_two_ranks(two_ranks: RankPool, name: str, number: int) -> None:
    assert two_ranks.run(_states, name) == [["passed"] * number] * 2


def _clips_to_half(clipping):
    clip = clipping()
    return lambda parameters, norm: clip(parameters, norm / 2)


def _ignored_on_a_mesh(replay, model, routes):
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return replay(model, torch.full_like(routes, -1) if sharded else routes)  # routed as usual


def _rounded(save, model, folder):
    return save(model, folder, dtype=torch.bfloat16)


def _changed(onload, model):
    report = onload(model)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1.0)
    return report


#: The check, the name in the module that is replaced, and its substitute, which gets the original first.
FAULTS = {
    "a smaller norm": ("steps", "clipping", _clips_to_half),
    "routes that are ignored": ("routes", "replay_routes", _ignored_on_a_mesh),
    "weights that are rounded": ("weights", "save_weights", _rounded),
    "a parameter that changes": ("offload", "onload", _changed),
}


def _states_with(fault: str) -> list[str]:
    name, target, substitute = FAULTS[fault]
    original = getattr(training, target)
    setattr(training, target, partial(substitute, original))
    try:
        return _states(name)
    finally:
        setattr(training, target, original)


@pytest.mark.parametrize("fault", FAULTS)
def test_checks_find_a_fault(two_ranks: RankPool, fault: str) -> None:
    assert {states[-1] for states in two_ranks.run(_states_with, fault)} == {"failed"}


def test_synchronizing_calls_are_counted_by_place(monkeypatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    places: Counter[str] = Counter()
    with training.synchronizing_calls(places):
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", "default"]
    ((place, count),) = places.items()
    assert place.startswith("test_training.py:")
    assert count == 3


def test_host_waits_need_a_cuda_device() -> None:
    with pytest.raises(NotRun, match="only CUDA"):
        next(training.check_host_waits("dense", World("cpu", 1, 1), CPU))


def test_parameter_difference_is_the_largest() -> None:
    model, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    nn.init.constant_(other.weight, -0.5)
    assert training.parameter_difference(model, other) == 0.5
