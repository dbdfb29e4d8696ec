"""The engine in pipeline stages against verl's own FSDP2 engine; run by ``nox -s verl``, which has verl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdp_runtime import OptionError
from harness.ranks import RankPool

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

from with_verl import actions, checkpoints_on_disk, drive  # after the check
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


EPS = {"optim": {"override_optimizer_config": {"eps": 1e-3}}}


def _updates(reports: Any) -> Any:
    """The losses and norms of a rank that has outputs."""
    return next(report for report in reports if not any(math.isnan(norm) for _, norm in report))


def _close(one: Any, other: Any) -> None:
    assert [*_updates(other)] == [pytest.approx(each, rel=1e-5, abs=1e-5) for each in _updates(one)]


@pytest.mark.parametrize(("kind", "loss"), [("mixture", "ppo"), ("value", "value")])
def test_a_run_in_stages_goes_on_from_its_checkpoint_on_any_mesh(
    kind: str, loss: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    path = checkpoints_on_disk.write(kind, tmp_path)
    expected = two_ranks.run(actions.save_and_go_on, path, str(tmp_path / "tp"), tp=2, loss=loss, **EPS)
    staged = two_ranks.run(actions.save_and_go_on, path, str(tmp_path / "pp"), pp=2, loss=loss, **EPS)
    _close(expected, staged)
    for folder, mesh in (("pp", {"pp": 2}), ("pp", {"tp": 2}), ("tp", {"pp": 2})):
        _close(expected, two_ranks.run(actions.resume, path, str(tmp_path / folder), **mesh, loss=loss, **EPS))


def test_changes_of_weights_in_stages_give_a_receiver_the_trainers(
    two_ranks: RankPool, checkpoints: dict[str, str]
) -> None:
    found = two_ranks.run(actions.deltas, checkpoints["dense"], lr=1e-4, pp=2)
    assert 0 < found[0]["changed"] <= found[0]["total"]


def _refused(path: str, options: Mapping[str, Any]) -> str:
    from verl.workers.config.engine import EngineRouterReplayConfig

    if "router_replay" in options:
        options = {"router_replay": EngineRouterReplayConfig(**options["router_replay"])}
    try:
        engine = drive.build(drive.OURS, path, pp=2, **options)
        with engine.train_mode():
            engine.get_per_tensor_param(base_sync_done=True)
    except OptionError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router_replay": {"mode": "R2"}}, "reads the routes of all blocks, and pp=2"),
        ({"model": actions.LORA}, "the adapter alone is not sent from pp=2 stages"),
        ({"pp_schedule": "2F2B"}, "schedule='2F2B'"),
    ],
    ids=["routes", "adapter", "schedule"],
)
def test_stages_refuse_routes_adapters_alone_and_unknown_schedules(
    options: Mapping[str, Any], message: str, two_ranks: RankPool, checkpoints: dict[str, str]
) -> None:
    for said in two_ranks.run(_refused, checkpoints["dense"], options):
        assert message in said
