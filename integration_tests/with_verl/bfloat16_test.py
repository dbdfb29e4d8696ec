"""Gradient norms in bfloat16: a token at the edge of PPO's clip has a gradient or none, whichever way rounding goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.ranks import RankPool

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

from with_verl import checkpoints_on_disk, drive  # after the check

BF16 = {"param_dtype": "bf16"}
Found = dict[str, Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints_on_disk.write("dense", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def clipped(two_ranks: RankPool, path: str) -> dict[str, Found]:
    return _of_each(two_ranks, path, "ppo")


def _of_each(ranks: RankPool, path: str, loss: str) -> dict[str, Found]:
    """verl's engine in float32 and in bfloat16, and ours on two meshes in bfloat16."""
    runs: dict[str, tuple[str, dict[str, Any]]] = {
        "float32": (drive.VERLS, {}),
        "verl": (drive.VERLS, BF16),
        "dp": (drive.OURS, BF16),
        "tp": (drive.OURS, {**BF16, "tp": 2}),
    }
    return {name: ranks.run(drive.run, engine, path, loss=loss, **more)[0] for name, (engine, more) in runs.items()}


def _with_gradient(found: Found) -> torch.Tensor:
    """Which response tokens PPO's clip of 0.2 (3 for negative advantages) lets through at the first update."""
    kept = []
    for sample, scores in zip(drive.samples(), found["log_probs"], strict=True):
        ratio = (scores[int(sample["prompt"]) - 1 :] - sample["old_log_probs"]).exp()
        kept.append(torch.where(sample["advantages"] > 0, ratio < 1.2, (ratio > 0.8) & (ratio < 3)))
    return torch.cat(kept)


def _relative(found: Found, exact: Found) -> float:
    return max(abs(one / other - 1) for one, other in zip(found["norms"], exact["norms"], strict=True))


def test_norms_differ_where_a_token_crossed_the_clip(clipped: dict[str, Found]) -> None:
    exact = clipped["float32"]
    for name in ("verl", "dp", "tp"):
        crossed = int((_with_gradient(clipped[name]) != _with_gradient(exact)).sum())
        assert (crossed > 0) == (_relative(clipped[name], exact) > 0.1), name


def test_norms_without_the_clip_agree(two_ranks: RankPool, path: str) -> None:
    found = _of_each(two_ranks, path, "unclipped")
    for name in ("verl", "dp", "tp"):
        assert _relative(found[name], found["float32"]) < 0.03, name


def test_verls_log_probabilities_are_rounded_to_bfloat16(clipped: dict[str, Found]) -> None:
    exact = torch.cat(clipped["float32"]["log_probs"])
    errors = {name: float((torch.cat(clipped[name]["log_probs"]) - exact).abs().max()) for name in ("verl", "dp", "tp")}
    assert all(torch.equal(row.bfloat16().float(), row) for row in clipped["verl"]["log_probs"])
    assert max(errors["dp"], errors["tp"]) < errors["verl"] / 2, errors
