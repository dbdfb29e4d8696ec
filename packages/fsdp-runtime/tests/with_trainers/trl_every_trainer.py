"""TRL's trainers on a mesh against those of one process, with dense models and mixtures; run by ``nox -s trainers``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.ranks import RankPool
from harness.trainers import BATCH, Outcome, compare, differences, write_checkpoint
from harness.trl_trainers import build, trainers


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scoring")
    return write_checkpoint(folder, architecture="Qwen3ForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mixture"), architecture="Qwen3MoeForCausalLM")


def _compare(
    pool: RankPool, name: str, folder: Path, axes: dict[str, int], output: Path, **options: Any
) -> tuple[Outcome, Outcome, tuple[str, ...]]:
    teacher = write_checkpoint(output / "teacher", seed=1) if name in ("GKD", "Distillation") else None
    set_up = partial(build, name=name, output=str(output), teacher=teacher and str(teacher), **options)
    found, expected = compare(pool, set_up, folder, axes, key=f"{name} {folder} {options}")
    assert min(expected.logged("grad_norm")) > 0.01
    return found, expected, ("loss", "grad_norm", *trainers()[name][-1])


MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2})


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", trainers())
def test_losses_norms_and_weights_are_those_of_one_process(
    two_ranks: RankPool,
    four_ranks: RankPool,
    dense: Path,
    scoring: Path,
    tmp_path: Path,
    name: str,
    axes: dict[str, int],
) -> None:
    if name == "KTO" and "dp_replicate" in axes:
        axes = {"dp_replicate": 2, "tp": 2}  # its ranks take two samples or more
    pool = four_ranks if len(axes) > 1 else two_ranks
    found, expected, figures = _compare(pool, name, scoring if name == "Reward" else dense, axes, tmp_path)
    assert differences(found, expected, figures) == {}


@pytest.mark.parametrize("options", [{"lmbda": 1.0}, {"seq_kd": True, "beta": 1.0}], ids=str)
def test_sampled_distillation_is_that_of_one_process(
    two_ranks: RankPool, dense: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    found, expected, figures = _compare(two_ranks, "GKD", dense, {"tp": 2}, tmp_path, max_new_tokens=5, **options)
    assert differences(found, expected, figures) == {}


@pytest.mark.parametrize("axes", [{"tp": 2, "ep": 2}, {"dp_shard": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "GRPO"])
def test_they_are_with_experts_divided_over_ranks(
    two_ranks: RankPool, mixture: Path, tmp_path: Path, name: str, axes: dict[str, int]
) -> None:
    # The auxiliary loss is that of each rank's own batch, as under DDP; over dp it is not that of one process.
    options = {"router_aux_loss_coef": 0.0} if "dp_shard" in axes else {}
    found, expected, figures = _compare(two_ranks, name, mixture, axes, tmp_path, **options)
    assert differences(found, expected, figures) == {}


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "RLOO", "GRPO", "GKD", "GMPO", "Distillation"])
def test_they_are_with_sequences_divided_over_ranks(
    four_ranks: RankPool, dense: Path, tmp_path: Path, name: str
) -> None:
    found, expected, figures = _compare(four_ranks, name, dense, {"cp": 2, "tp": 2}, tmp_path)
    assert differences(found, expected, figures) == {}


@pytest.mark.parametrize(("name", "axes"), [("DPO", {"cp": 2}), ("DPO", {"tp": 2}), ("KTO", {"dp_shard": 2})], ids=str)
def test_they_are_with_log_probabilities_of_the_reference_that_are_computed_before(
    two_ranks: RankPool, dense: Path, tmp_path: Path, name: str, axes: dict[str, int]
) -> None:
    found, expected, figures = _compare(two_ranks, name, dense, axes, tmp_path, precompute_ref_log_probs=True)
    assert differences(found, expected, figures) == {}


def _in_micro_batches(model: Any, mesh: Any, dp: int, **options: Any) -> Any:
    """In one process a micro-batch for each of the mesh's two ranks."""
    if mesh is None:
        options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": BATCH // 2}
    return build(model, mesh, dp, name="DPO", use_weighting=False, **options)


@pytest.mark.parametrize("loss", ["sft", "aot_unpaired"])
def test_a_loss_of_a_micro_batch_is_that_of_one_process_with_the_same_ones(
    two_ranks: RankPool, dense: Path, tmp_path: Path, loss: str
) -> None:
    set_up = partial(_in_micro_batches, output=str(tmp_path), loss_type=loss)
    found, expected = compare(two_ranks, set_up, dense, {"dp_shard": 2}, key=f"DPO micro-batches {loss}")
    assert differences(found, expected) == {}
