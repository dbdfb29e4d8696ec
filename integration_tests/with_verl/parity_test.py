"""The engine against verl's own FSDP2 engine, or against one process; run by ``nox -s verl``, which has verl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.ranks import RankPool

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

from with_verl import actions, checkpoints_on_disk, drive, vision_drive  # after the check

#: AdamW divides gradients near zero by their own size; this epsilon keeps their rounding apart from the weights.
OPTIM = {"optim": {"override_optimizer_config": {"eps": 1e-3}}}
BOUND = 1e-5
MESHES: Mapping[str, Mapping[str, Any]] = {
    "dp": {},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": -1, "dp_shard": 1},
    "ulysses": {"ulysses_sequence_parallel_size": 2},
    "hsdp": {"fsdp_size": 1},
}
PADDED = {"model": {"use_remove_padding": False}}
#: Whether the model keeps packed documents apart, and whether a batch is packed.
PADDINGS: Mapping[str, Mapping[str, Any]] = {
    "packed": {},
    "padded": PADDED,
    "padded batch": {"batch": {"use_remove_padding": False}},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return {kind: checkpoints_on_disk.write(kind, folder) for kind in ("dense", "mixture", "hybrid", "vision")}


def agree(one: Mapping[str, Any], other: Mapping[str, Any], *, scores: tuple[str, ...]) -> None:
    """Scores of every token, losses, norms and weights."""
    for name in scores:
        for index, (first, second) in enumerate(zip(one[name], other[name], strict=True)):
            torch.testing.assert_close(
                second, first, atol=BOUND, rtol=BOUND, msg=lambda m, n=name, i=index: f"{n} {i}: {m}"
            )
    assert other["losses"] == pytest.approx(one["losses"], rel=BOUND, abs=BOUND)
    assert other["norms"] == pytest.approx(one["norms"], rel=BOUND)
    assert set(other["weights"]) == set(one["weights"])
    for name, weight in one["weights"].items():
        torch.testing.assert_close(
            other["weights"][name], weight, atol=BOUND, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture(scope="module")
def of_verl(two_ranks: RankPool, checkpoints: dict[str, str]) -> dict[str, Any]:
    """What verl's FSDP2 engine returns on two ranks."""
    return two_ranks.run(drive.run, drive.VERLS, checkpoints["dense"], **OPTIM, timeout=500)[0]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_dense_model_is_trained_as_by_verls_engine(
    mesh: str, padding: str, two_ranks: RankPool, checkpoints: dict[str, str], of_verl: dict[str, Any]
) -> None:
    options = {**MESHES[mesh], **PADDINGS[padding], **OPTIM}
    found = two_ranks.run(drive.run, drive.OURS, checkpoints["dense"], **options, timeout=500)[0]
    agree(of_verl, found, scores=("log_probs", "entropy"))


def test_rows_of_compiled_blocks_divide_into_shards_of_one_length(
    two_ranks: RankPool, checkpoints: dict[str, str]
) -> None:
    options: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
    for found in two_ranks.run(actions.lengths_of_rows, checkpoints["dense"], compile=True, **options):
        assert [length % 2 for length in found] == [0, 0]
    assert any(length % 2 for length in two_ranks.run(actions.lengths_of_rows, checkpoints["dense"], **options)[0])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp", "tp", "sp"])
def test_compiled_blocks_are_trained_as_by_verls_engine(
    mesh: str, two_ranks: RankPool, checkpoints: dict[str, str], of_verl: dict[str, Any]
) -> None:
    options = {**MESHES[mesh], "compile": True, **OPTIM}
    found = two_ranks.run(drive.run, drive.OURS, checkpoints["dense"], **options, timeout=900)[0]
    agree(of_verl, found, scores=("log_probs", "entropy"))


def test_products_of_axes(four_ranks: RankPool, checkpoints: dict[str, str], of_verl: dict[str, Any]) -> None:
    for mesh in ({"tp": 2}, {"tp": 2, "cp": 2, "sequence_parallel": True}):
        found = four_ranks.run(drive.run, drive.OURS, checkpoints["dense"], **mesh, **OPTIM, timeout=500)[0]
        agree(of_verl, found, scores=("log_probs", "entropy"))


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"ep": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_a_mixture(mesh: dict[str, Any], two_ranks: RankPool, checkpoints: dict[str, str]) -> None:
    path = checkpoints["mixture"]
    expected = _verls(two_ranks, path)
    agree(expected, two_ranks.run(drive.run, drive.OURS, path, **mesh, **OPTIM)[0], scores=("log_probs", "entropy"))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()


MUON = {"optimizer_impl": "fsdp_runtime.optim", "optimizer": "Muon"}


@pytest.mark.parametrize(
    ("kind", "mesh"), [("dense", {}), ("dense", {"tp": 2}), ("dense", {"cp": 2}), ("mixture", {"ep": 2})]
)
def test_muon_takes_the_steps_of_one_process(
    kind: str, mesh: dict[str, Any], one_rank: RankPool, two_ranks: RankPool, checkpoints: dict[str, str]
) -> None:
    optim = {**MUON, "override_optimizer_config": {"adamw_eps": 1e-3, "ns_dtype": "float32"}}
    if f"muon {kind}" not in _known:
        _known[f"muon {kind}"] = one_rank.run(drive.run, drive.OURS, checkpoints[kind], optim=optim)[0]
    found = two_ranks.run(drive.run, drive.OURS, checkpoints[kind], optim=optim, **mesh)[0]
    agree(_known[f"muon {kind}"], found, scores=("log_probs", "entropy"))


_known: dict[str, Any] = {}


def _verls(ranks: RankPool, path: str, **options: Any) -> dict[str, Any]:
    if path not in _known:
        _known[path] = ranks.run(drive.run, drive.VERLS, path, **options, **OPTIM, timeout=500)[0]
    return _known[path]


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"cp": 2}], ids=str)
def test_a_hybrid_with_packed_rows_is_trained_as_one_sample_at_a_time(
    mesh: dict[str, Any], two_ranks: RankPool, checkpoints: dict[str, str]
) -> None:
    """verl's own engine lets delta nets read the sample before in packed rows."""
    path, alone = checkpoints["hybrid"], {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    if path not in _known:
        _known[path] = two_ranks.run(drive.run, drive.VERLS, path, batch=alone, **PADDED, **OPTIM, timeout=500)[0]
    for padding in ("packed", "padded batch"):
        found = two_ranks.run(drive.run, drive.OURS, path, **mesh, **PADDINGS[padding], **OPTIM)[0]
        agree(_known[path], found, scores=("log_probs", "entropy"))


def test_a_vision_language_model_scores_samples_with_and_without_images(
    two_ranks: RankPool, checkpoints: dict[str, str]
) -> None:
    """verl's own engine cannot run it on the CPU: its forward fails where a micro-batch has no image."""
    path = checkpoints["vision"]
    expected, norms = vision_drive.alone(path), []
    sp = {"tp": 2, "sequence_parallel": True}
    runs = (({}, True), ({"tp": 2}, True), ({"cp": 2}, True), ({}, False), (sp, False), ({"cp": 2}, False))
    for mesh, packed in runs:
        found = two_ranks.run(vision_drive.run, path, packed=packed, **mesh)[0]
        norms.append(found["norm"])
        for one, other in zip(expected, found["log_probs"], strict=True):
            torch.testing.assert_close(other, one, atol=BOUND, rtol=BOUND)
    assert norms == pytest.approx([norms[0]] * len(norms), rel=BOUND)
    frozen = two_ranks.run(vision_drive.run, path, packed=True, freeze_vision_tower=True)[0]
    assert frozen["norm"] < norms[0]


def test_an_adapter_is_trained_as_by_verls_engine(
    two_ranks: RankPool, checkpoints: dict[str, str], tmp_path: Path
) -> None:
    path = checkpoints["dense"]
    adapter = {"lora_rank": 4, "lora_alpha": 8, "lora_adapter_path": checkpoints_on_disk.write_adapter(path, tmp_path)}
    options: dict[str, Any] = {"model": adapter, "exports": False, **OPTIM}
    expected = two_ranks.run(drive.run, drive.VERLS, path, **options, timeout=500)[0]
    for mesh in ({}, {"tp": 2}, {"cp": 2}):
        agree(
            expected, two_ranks.run(drive.run, drive.OURS, path, **options, **mesh)[0], scores=("log_probs", "entropy")
        )
