"""The engine in pipeline stages against verl's own FSDP2 engine; run by ``nox -s verl``, which has verl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.ranks import RankPool

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

from with_verl import checkpoints_on_disk, drive  # after the check
from with_verl.parity_test import OPTIM, PADDED, agree

SFT = {"loss": "sft"}
#: Checkpoint, axes and schedule, and options of ``drive.run`` for both engines.
STAGES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "dense": ("dense", {}, {}),
    "padded rows": ("dense", {}, PADDED),
    "mixture, GPipe": ("mixture", {"pp_schedule": "GPipe"}, {}),
    "SFT": ("dense", {}, SFT),
    "dense with tp": ("dense", {"tp": 2, "sequence_parallel": True}, {}),
    "dense with dp_shard": ("dense", {"dp_shard": 2}, {}),
    "mixture with cp": ("mixture", {"cp": 2}, {}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return {kind: checkpoints_on_disk.write(kind, folder) for kind in ("dense", "mixture")}


_known: dict[str, Any] = {}


@pytest.mark.parametrize("case", STAGES)
def test_stages_are_trained_as_by_verls_engine(
    case: str, two_ranks: RankPool, four_ranks: RankPool, checkpoints: dict[str, str]
) -> None:
    kind, axes, options = STAGES[case]
    if (key := f"{kind} {options}") not in _known:
        _known[key] = two_ranks.run(drive.run, drive.VERLS, checkpoints[kind], **options, **OPTIM, timeout=500)[0]
    pool = four_ranks if {"tp", "cp", "dp_shard"} & {*axes} else two_ranks
    reports = pool.run(drive.run, drive.OURS, checkpoints[kind], pp=2, **axes, **options, **OPTIM, timeout=500)
    with_outputs = [report for report in reports if report["norms"][0] is not None]
    assert len(with_outputs) == axes.get("dp_shard", 1)
    assert all("log_probs" in report for report in with_outputs)
    agree(_known[key], with_outputs[0], scores=("log_probs", "entropy"))
    for report in reports:
        assert report["losses"] == pytest.approx(with_outputs[0]["losses"], rel=1e-6)
