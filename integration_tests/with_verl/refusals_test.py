"""Wrong input: an error on every rank with the way out, or the right numbers; run by ``nox -s verl``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.ranks import RankPool

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

from with_verl import actions, checkpoints_on_disk  # after the check


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return {kind: checkpoints_on_disk.write(kind, folder) for kind in ("dense", "mixture", "hybrid", "vision")}


@pytest.fixture(scope="module")
def path(paths: dict[str, str]) -> str:
    return paths["dense"]


STATIC = {"use_dynamic_bsz": False}
#: What is given to the engine, what the batch says, and what the error says.
CASES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "mesh": ({"tp": 3}, {}, "MeshError: .*does not fill the world of 2 ranks"),
    "two meshes": ({"fsdp_size": 2, "dp_replicate": 2}, {}, "OptionError: fsdp_size=2"),
    "ulysses and cp": (
        {"ulysses_sequence_parallel_size": 2, "cp": 4},
        {},
        "OptionError: ulysses_sequence_parallel_size",
    ),
    "field of Megatron's": ({"tensor_model_parallel_size": 2}, {}, r"tensor_model_parallel_size \(here: tp\)"),
    "unknown field": ({"fsdp_sise": 2}, {}, "has no field fsdp_sise"),
    "dtype": ({"param_dtype": "fp16"}, {}, "OptionError: param_dtype='fp16'.*write bf16"),
    "no dtype": ({"reduce_dtype": "fp8"}, {}, "OptionError: reduce_dtype='fp8' is no dtype"),
    "compile of entropies": ({"use_torch_compile": True}, {}, "compile=True"),
    "prefetch of FSDP1": ({"forward_prefetch": True}, {}, "prefetch_forward=1"),
    "wrap policy": ({"wrap_policy": {"min_num_params": 5}}, {}, "wrap_policy"),
    "QAT": ({"qat": {"enable": True}}, {}, "qat.enable=True"),
    "liger": ({"model": {"use_liger": True}}, {}, "model.use_liger=True"),
    "activation offload": ({"model": {"enable_activation_offload": True}}, {}, "enable_activation_offload=True"),
    "tiled MLP": ({"model": {"tiled_mlp": {"enabled": True}}}, {}, "tiled_mlp"),
    "kernels": (
        {"model": {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "triton"}}},
        {},
        "impl_backend='triton'",
    ),
    "LoRA of Megatron": ({"model": {"lora": {"rank": 8}}}, {}, "model.lora_rank"),
    "rate": ({"lr": -1.0}, {}, "OptionError: optim: torch.optim.AdamW cannot be built: Invalid learning rate: -1.0"),
    "no such layer": ({"model": {**actions.LORA, "target_modules": ["x"]}}, {}, "OptionError: peft refuses.*not found"),
    "limit as text": ({}, {"max_token_len_per_gpu": "40"}, "dp rank 0: max_token_len_per_gpu='40': give a positive"),
    "vision tower": ({"freeze_vision_tower": True}, {}, "ModelError: freeze_vision_tower=True"),
    "schedule": ({"checkpoint": {"async_save": True}}, {}, "async_save=True"),
    "contents": ({"checkpoint": {"save_contents": ["weights"]}}, {}, "has 'weights'"),
    "contents without a model": ({"checkpoint": {"save_contents": ["optimizer"]}}, {}, "without 'model'"),
    "adapter alone": ({"checkpoint": {"save_lora_only": True}}, {}, "save_lora_only=True"),
    "packing": ({"model": {"use_remove_padding": False}}, {}, "use_remove_padding=True, but the model's is False"),
    "long sequence": ({}, {"max_token_len_per_gpu": 16}, "dp rank 1: the longest sequence has 17 tokens.*to 17"),
    "long sequence over cp": ({"cp": 2}, {"max_token_len_per_gpu": 8}, "has 17 tokens.*times cp=2.*to 9"),
    "no limit": ({}, {"max_token_len_per_gpu": None}, "set max_token_len_per_gpu"),
    "no size": ({}, STATIC, "needs micro_batch_size_per_gpu"),
    "samples that do not divide": (
        {},
        {**STATIC, "micro_batch_size_per_gpu": 3},
        "dp rank 0: 4 samples do not divide into micro-batches of 3",
    ),
    "samples of one rank": (
        {},
        {**STATIC, "micro_batch_size_per_gpu": 2, "own_of_rank": [[0, 1], [2, 3, 4]]},
        "dp rank 1: 3 samples do not",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_says_what_is_wrong(case: str, two_ranks: RankPool, path: str) -> None:
    options, settings, message = CASES[case]
    found = two_ranks.run(actions.refused, path, options, settings, timeout=200)
    assert len(set(found)) == 1
    assert re.search(message, found[0]), found[0]


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("dense", {}), ("mixture", {}), ("mixture", {"ep": 2}), ("hybrid", {}), ("vision", {})],
    ids=str,
)
def test_ranks_with_fewer_samples_than_peers_have_micro_batches(
    kind: str, mesh: Mapping[str, int], two_ranks: RankPool, paths: dict[str, str]
) -> None:
    _uneven_is_even(two_ranks, paths[kind], images=kind == "vision", **mesh)


@pytest.mark.parametrize(
    ("kind", "mesh"), [("mixture", {"tp": 2, "ep": 2}), ("hybrid", {"cp": 2}), ("vision", {"cp": 2})], ids=str
)
def test_they_have_on_products_of_axes(
    kind: str, mesh: Mapping[str, int], four_ranks: RankPool, paths: dict[str, str]
) -> None:
    _uneven_is_even(four_ranks, paths[kind], images=kind == "vision", **mesh)


def _uneven_is_even(ranks: RankPool, path: str, **options: Any) -> None:
    """One rank of dp has a text, the other seven samples, of which some have images where the model takes them."""
    even = ranks.run(actions.uneven, path, [[0, 2, 4, 6], [1, 3, 5, 7]], dynamic=True, **options)[0]
    for dynamic in (True, False):
        shares = [[0, 1, 2, 3, 4, 5, 6], [7]]
        found = ranks.run(actions.uneven, path, shares, dynamic=dynamic, **options)
        assert [loss for loss, _, _ in found] == pytest.approx([even[0]] * len(found), rel=1e-5)
        assert [norm for _, norm, _ in found if norm is not None] == pytest.approx([even[1]] * 2, rel=1e-5)
        assert all(tensor.isfinite().all() for _, _, weights in found for tensor in weights.values())


def test_a_bad_sample_of_one_rank_is_refused_on_every_rank(two_ranks: RankPool, path: str) -> None:
    found = two_ranks.run(actions.spoiled, path)
    assert found[0] == found[1]
    assert found[0].pop("fine") == "nothing was raised"
    for message, said in found[0].items():
        assert re.match(f"OptionError: dp rank 1: .*{message}", said), said


def test_a_step_with_rewards_that_are_not_numbers_changes_nothing(two_ranks: RankPool, path: str) -> None:
    before, after, norm = two_ranks.run(actions.not_a_number, path)[0]
    assert norm != norm
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_model_that_is_not_trained_says_so_on_every_rank(two_ranks: RankPool, path: str) -> None:
    """With replicas one rank alone sends weights, and the other one must not wait for it."""
    for *calls, changes in two_ranks.run(actions.asked_too_early, path, fsdp_size=1):
        assert len(calls) == 4
        assert all(each.startswith("OptionError: this engine is forward_only=True") for each in calls)
        assert re.match(r"OptionError: .*call prime_delta_snapshots\(\) first", changes)
