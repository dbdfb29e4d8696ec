"""A sweep compares every mesh of a number of ranks, best first, and keeps the failed ones."""

from __future__ import annotations

import importlib
import json
import math
from typing import Any

import pytest

from fsdp_runtime import MeshSpec, ModelError
from fsdp_runtime.dry_run import Estimate, EstimateError, Sweep, sweep
from fsdp_runtime.dry_run.compare import candidate_meshes, make_candidates, rank_candidates
from fsdp_runtime.dry_run.sweep_types import Candidate
from harness.estimates import GIB, made_estimate, made_settings, made_traffic


def test_every_mesh_fills_the_world_and_tp_fits_a_node() -> None:
    found = candidate_meshes(48, max_tp=8, cp=(1, 2))
    assert all(math.prod(spec.sizes.values()) == 48 for spec in found)
    assert {spec.tp for spec in found} == {1, 2, 3, 4, 6, 8}
    assert {spec.cp for spec in found} == {1, 2}
    assert len(found) == len(set(found))


def test_replicas_are_one_or_one_per_node_by_default() -> None:
    assert candidate_meshes(64, max_tp=1)[0] == MeshSpec(dp_shard=64)
    assert set(candidate_meshes(64, max_tp=8)) >= {MeshSpec(dp_replicate=8, dp_shard=8), MeshSpec(dp_replicate=8, tp=8)}
    assert {spec.dp_replicate for spec in candidate_meshes(64, dp_replicate=(2, 3, 4))} == {2, 4}


def test_a_size_that_is_not_positive_is_refused_by_name() -> None:
    with pytest.raises(EstimateError, match="cp=0"):
        candidate_meshes(8, cp=(1, 0))


def test_sequence_parallelism_is_tried_only_with_tp() -> None:
    specs = [MeshSpec(dp_shard=8), MeshSpec(dp_shard=4, tp=2)]
    found = make_candidates(specs, sequence_parallel=(False, True), activation_checkpointing=("none", "block"))
    assert [(each.mesh.tp, each.sequence_parallel) for each in found] == [
        *((1, False), (1, False), (2, False), (2, False), (2, True), (2, True))
    ]


def _candidate(
    estimate: Estimate | None, *, error: str = "", device_flops: float | None = None, **axes: int
) -> Candidate:
    plain = Candidate(mesh=MeshSpec(**axes), sequence_parallel=False, activation_checkpointing="none", error=error)
    return plain if estimate is None else plain.with_estimate(estimate, device_flops=device_flops)


def test_numbers_are_per_token_of_the_step() -> None:
    estimate = made_estimate(seconds=0.5, settings=made_settings(seq_len=1000, micro_batch=2))
    candidate = _candidate(estimate, dp_replicate=2, dp_shard=5, tp=4)
    assert candidate.tokens == 20_000  # ranks of tp share theirs
    assert candidate.seconds == pytest.approx(0.5 * 50)
    assert candidate.bytes_sent == pytest.approx(28 * 2**20 * 50)
    assert _candidate(estimate, device_flops=3e15, dp_shard=10).seconds == pytest.approx((0.5 + 1) * 1e6 / 20_000)


def test_fitting_candidates_come_first_then_the_fastest_and_failed_ones_last() -> None:
    traffic = (made_traffic(seconds=1.0),)
    slow = _candidate(made_estimate(device_memory=40 * GIB, traffic=(made_traffic(seconds=3.0),)), dp_shard=2)
    fast = _candidate(made_estimate(device_memory=40 * GIB, traffic=traffic), dp_shard=2)
    fastest_per_token = _candidate(made_estimate(device_memory=40 * GIB, traffic=traffic), dp_shard=4)
    too_large = _candidate(made_estimate(device_memory=20 * GIB, traffic=traffic), dp_shard=8)
    refused = _candidate(None, error="heads", tp=3)
    found = rank_candidates(8, [refused, too_large, slow, fast, fastest_per_token])
    assert found.candidates == (fastest_per_token, fast, slow, too_large, refused)
    assert found.best is fastest_per_token
    assert "seconds per token" in found.ranked_by


def test_an_axis_without_a_bandwidth_does_not_count_as_free() -> None:
    priced = _candidate(made_estimate(traffic=(made_traffic(seconds=9.0),)), dp_shard=2)
    partly = _candidate(made_estimate(traffic=(made_traffic(seconds=1.0), made_traffic(axis="dp_shard"))), dp_shard=2)
    assert rank_candidates(2, [partly, priced]).candidates == (priced, partly)


def test_a_few_bytes_without_a_bandwidth_change_nothing() -> None:
    few = made_traffic(axis="world", kind="all_reduce", nbytes=8, bytes_sent=15)
    fast = _candidate(made_estimate(traffic=(made_traffic(seconds=1.0), few)), dp_shard=2)
    slow = _candidate(made_estimate(traffic=(made_traffic(seconds=9.0),)), dp_shard=2)
    assert rank_candidates(2, [slow, fast]).candidates == (fast, slow)


def test_without_speeds_candidates_are_ordered_by_device_memory_then_by_bytes_sent() -> None:
    quiet = _candidate(made_estimate(peak=30 * GIB, traffic=()), dp_shard=2)
    low = _candidate(made_estimate(peak=20 * GIB, seconds=None), dp_shard=2)
    high = _candidate(made_estimate(peak=30 * GIB, seconds=None), dp_shard=2)
    found = rank_candidates(2, [high, quiet, low])
    assert found.candidates == (low, quiet, high)
    assert "device memory" in found.ranked_by


def test_there_is_no_best_candidate_if_none_fits() -> None:
    found = rank_candidates(2, [_candidate(made_estimate(device_memory=GIB), dp_shard=2)])
    assert found.best is None
    assert len(found.estimated) == 1


def _stand_in(model: str, mesh: MeshSpec, **options: Any) -> Estimate:
    """``estimate`` of a model that has 2 heads, and that fails in torch with two replicas."""
    if mesh.tp > 2:
        raise ModelError(f"tp={mesh.tp}: 2 heads do not divide")
    if mesh.dp_replicate == 2:
        raise RuntimeError("sizes differ")
    return made_estimate(settings=made_settings(mesh=mesh.sizes, seq_len=options["seq_len"]), seconds=1.0)


def _patch(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package binds the function of the same name over the module.
    monkeypatch.setattr(importlib.import_module("fsdp_runtime.dry_run.compare"), "estimate", _stand_in)


def _reasons(found: Sweep) -> dict[str, str]:
    return {candidate.label: candidate.error for candidate in found.candidates}


def test_errors_are_kept_with_their_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch)
    steps: list[tuple[str, int, int]] = []
    found = sweep(
        "any",
        8,
        seq_len=64,
        dp_replicate=(1, 2),
        sequence_parallel=(False,),
        activation_checkpointing=("none",),
        workers=0,
        progress=lambda *step: steps.append(step),
    )
    assert _reasons(found) == {
        "dp_shard=8": "",
        "dp_shard=4 tp=2": "",
        "dp_shard=2 tp=4": "tp=4: 2 heads do not divide",
        "tp=8": "tp=8: 2 heads do not divide",
        "dp_replicate=2 dp_shard=4": "RuntimeError: sizes differ",
        "dp_replicate=2 dp_shard=2 tp=2": "RuntimeError: sizes differ",
        "dp_replicate=2 tp=4": "tp=4: 2 heads do not divide",
    }
    assert [(done, of) for _, done, of in steps] == [(done, 7) for done in range(8)]
    assert steps[0][0] == "7 dry runs, 1 at a time: 1 to 14 minutes"  # the expected time, before the first of them
    data = json.loads(found.to_json())
    assert [bool(each["estimate"]) for each in data["candidates"]] == [True, True, *[False] * 5]
    assert data["candidates"][0]["estimate"]["fits"] is None


def test_options_without_a_mesh_are_refused() -> None:
    with pytest.raises(EstimateError, match="no mesh of 8 ranks"):
        sweep("any", 8, seq_len=64, dp_replicate=(3,), workers=0)


def test_a_process_that_dies_does_not_affect_other_candidates() -> None:
    module = importlib.import_module("fsdp_runtime.dry_run.compare")
    dies = "__import__('os')._exit(1)"
    # Expressions instead of candidates: processes that evaluate them start without importing torch.
    found = dict(module._outcomes(eval, ["'first'", dies, "'last'"], 1, lambda _: True))
    assert "died" in found.pop(dies)
    assert found == {"'first'": "first", "'last'": "last"}


def test_ways_of_attention_are_tried_on_meshes_with_cp_only() -> None:
    found = make_candidates(
        candidate_meshes(2, max_tp=1, cp=(1, 2), dp_replicate=(1,)),
        sequence_parallel=(False,),
        activation_checkpointing=("none",),
        context_parallel=("ring", "ulysses"),
    )
    assert [each.label for each in found] == ["dp_shard=2", "cp=2, ring", "cp=2, ulysses"]


def test_sweep_has_meshes_without_tp_where_only_sequence_parallelism_is_given() -> None:
    found = make_candidates(
        [MeshSpec(dp_shard=2), MeshSpec(tp=2)], sequence_parallel=(True,), activation_checkpointing=("none",)
    )
    assert [(each.mesh.tp, each.sequence_parallel) for each in found] == [(1, False), (2, True)]
