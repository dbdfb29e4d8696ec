"""Checkpoints, exports, adapters, replay and distillation of the engine; run by ``nox -s verl``, which has verl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from harness.ranks import RankPool, RanksFailed

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

from with_verl import actions, checkpoints_on_disk, drive  # after the check


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return {kind: checkpoints_on_disk.write(kind, folder) for kind in ("dense", "mixture", "hybrid", "value")}


def close(one: Any, other: Any, bound: float = 1e-5) -> None:
    assert [*other] == [pytest.approx(each, rel=bound, abs=bound) for each in one]


def test_an_adapter_goes_on_from_its_checkpoint_on_any_mesh(
    two_ranks: RankPool, paths: dict[str, str], tmp_path: Path
) -> None:
    options = {"model": actions.LORA}
    expected = two_ranks.run(actions.save_and_go_on, paths["dense"], str(tmp_path), tp=2, **options)[0]
    close(expected, two_ranks.run(actions.resume, paths["dense"], str(tmp_path), cp=2, **options)[0])


def test_a_run_goes_on_from_its_checkpoint_on_any_mesh(
    two_ranks: RankPool, paths: dict[str, str], tmp_path: Path
) -> None:
    expected = two_ranks.run(actions.save_and_go_on, paths["dense"], str(tmp_path), tp=2)[0]
    for mesh in ({"tp": 2}, {"cp": 2}, {}):
        close(expected, two_ranks.run(actions.resume, paths["dense"], str(tmp_path), **mesh)[0])
    with pytest.raises(RanksFailed, match="dp=1") as failed:
        two_ranks.run(actions.resume_with_data_of, str(tmp_path), paths["dense"])
    assert len(failed.value.errors) == 2
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_1" / "actor" / "huggingface")
    assert exported.config.hidden_size == 64


def test_a_run_goes_on_after_its_optimizer_alone_was_on_the_host(
    two_ranks: RankPool, paths: dict[str, str], tmp_path: Path
) -> None:
    expected = two_ranks.run(actions.save_and_go_on, paths["dense"], str(tmp_path / "one"))[0]
    close(expected, two_ranks.run(actions.go_on_after_offload, paths["dense"], str(tmp_path / "two"))[0])


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        ("mixture", {"ep": 2}, [{"tp": 2}, {"tp": 2, "ep": 2}, {}]),
        ("hybrid", {"tp": 2}, [{"cp": 2}, {}]),
        ("value", {"tp": 2}, [{"cp": 2}, {}]),
    ],
)
def test_a_mixture_a_hybrid_and_a_critic_go_on_on_any_mesh(
    kind: str, saved: Any, loaded: list[Any], two_ranks: RankPool, paths: dict[str, str], tmp_path: Path
) -> None:
    options = {"loss": "value" if kind == "value" else "ppo", "optim": {"override_optimizer_config": {"eps": 1e-3}}}
    expected = two_ranks.run(actions.save_and_go_on, paths[kind], str(tmp_path), **saved, **options)[0]
    for mesh in loaded:
        close(expected, two_ranks.run(actions.resume, paths[kind], str(tmp_path), **mesh, **options)[0])
    auto = transformers.AutoModelForTokenClassification if kind == "value" else transformers.AutoModelForCausalLM
    _, found = auto.from_pretrained(tmp_path / "global_step_1/actor/huggingface", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


def test_a_checkpoint_of_verls_engine_gives_its_weights_and_nothing_else(
    two_ranks: RankPool, paths: dict[str, str], tmp_path: Path
) -> None:
    contents = ["model", "optimizer", "extra", "hf_model"]
    expected = two_ranks.run(actions.save_by_verl, paths["dense"], str(tmp_path), contents=contents)[0]
    with pytest.raises(RanksFailed, match=r"_world_size_2_rank_0\.pt.*load_contents=\[model\]"):
        two_ranks.run(actions.load_verls, paths["dense"], str(tmp_path), contents=["model", "optimizer"], tp=2)
    found = two_ranks.run(actions.load_verls, paths["dense"], str(tmp_path), contents=["model"], tp=2)[0]
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-6)


def test_contents_say_what_is_loaded_of_an_export(two_ranks: RankPool, paths: dict[str, str], tmp_path: Path) -> None:
    """An export of an adapter's model has it merged: over a model with an adapter it would count twice."""
    for contents, moves in ((["model"], True), ([], False)):
        for said, moved in two_ranks.run(actions.load_of_exports, paths["dense"], str(tmp_path / "a"), contents):
            assert (said, moved > 1e-3) == ("", moves)
    options = {"model": actions.LORA}
    found = two_ranks.run(actions.load_of_exports, paths["dense"], str(tmp_path / "b"), ["model"], **options)
    for said, moved in found:
        assert said.startswith("CheckpointError: ")
        assert "model.lora_adapter_path" in said
        assert moved == 0


def test_adapters_are_sent_by_themselves_and_switched_off(two_ranks: RankPool, paths: dict[str, str]) -> None:
    dp, tp = (two_ranks.run(actions.adapters, paths["dense"], **mesh)[0] for mesh in ({}, {"tp": 2}))
    for found in (dp, tp):
        assert found["moved"] > 1e-3
        assert found["off"] == 0
        assert found["config"]["peft_type"].value == "LORA"
        assert found["config"]["task_type"].value == "CAUSAL_LM"
        assert "model.layers.0.self_attn.q_proj.base_layer.weight" in found["base"]
        assert not any("lora" in name for name in found["base"])
    assert set(dp["factors"]) == set(tp["factors"])
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in dp["factors"]
    for name, factor in dp["factors"].items():
        torch.testing.assert_close(tp["factors"][name], factor, atol=2e-3, rtol=0)
    for one, other in zip(dp["curve"], tp["curve"], strict=True):
        close(one, other)


@pytest.mark.parametrize("kind", ["dense", "mixture", "adapter"])
def test_what_changed_gives_a_receiver_the_trainers_weights(
    kind: str, two_ranks: RankPool, paths: dict[str, str]
) -> None:
    """An adapter is merged, where verl does not ask for the base model and the factors."""
    meshes: list[dict[str, Any]] = [{"ep": 2}, {"tp": 2}] if kind == "mixture" else [{}, {"tp": 2}]
    options: dict[str, Any] = {"lr": 1e-4} if kind != "adapter" else {"lr": 1e-2, "model": actions.LORA}
    for mesh in meshes:
        found = two_ranks.run(actions.deltas, paths["dense" if kind == "adapter" else kind], **options, **mesh)
        assert 0 < found[0]["changed"] <= found[0]["total"]


def test_routes_are_recorded_and_replayed(two_ranks: RankPool, paths: dict[str, str]) -> None:
    both = {"tp": 2, "ep": 2, "sequence_parallel": True}
    runs = [({}, True), ({"tp": 2}, True), ({"cp": 2}, True), ({}, False), ({"ep": 2}, True), (both, True)]
    found = [
        two_ranks.run(actions.replayed, paths["mixture"], packed=packed, **mesh)[0]
        for mesh, packed in runs  # type: ignore[arg-type]
    ]
    for each in found:
        assert each["missing"].startswith("OptionError: router_replay: the batch has no routed_experts")
        assert each["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
        assert each["norm"] == pytest.approx(found[0]["norm"], rel=1e-5)
        for one, other in zip(found[0]["routes"], each["routes"], strict=True):
            assert one.shape[1:] == (2, 2)
            assert torch.equal(one, other)


def test_distillation_and_squares_are_verls(two_ranks: RankPool, paths: dict[str, str]) -> None:
    expected = two_ranks.run(actions.distilled, drive.VERLS, paths["dense"], timeout=500)[0]
    for mesh in ({}, {"tp": 2}, {"cp": 2}):
        found = two_ranks.run(actions.distilled, drive.OURS, paths["dense"], **mesh)[0]
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        for name, values in expected.items():
            if name != "norm":
                for one, other in zip(values, found[name], strict=True):
                    torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("start", ["value", "dense"])
def test_a_critic_is_the_same_on_any_mesh(start: str, two_ranks: RankPool, paths: dict[str, str]) -> None:
    """A critic starts from a token classifier, or from a language model with a head that is drawn."""
    options: Mapping[str, Any] = {"loss": "value", "optim": {"override_optimizer_config": {"eps": 1e-3}}}
    dp, tp, cp = (
        two_ranks.run(drive.run, drive.OURS, paths[start], **options, **mesh)[0] for mesh in ({}, {"tp": 2}, {"cp": 2})
    )
    if start == "value":
        for one, other in zip(drive.values_alone(paths[start]), dp["values"], strict=True):
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
    for found in (tp, cp):
        close(dp["losses"], found["losses"])
        close(dp["norms"], found["norms"])
        for one, other in zip(dp["values"], found["values"], strict=True):
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mesh", [{}, {"cp": 2}, {"ep": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_routes_of_a_rollout_lack_each_last_token(
    mesh: dict[str, int], two_ranks: RankPool, paths: dict[str, str]
) -> None:
    difference, missing = two_ranks.run(actions.rollout_routes, paths["mixture"], **mesh)[0]
    assert difference == pytest.approx(0, abs=1e-6)
    assert "R3 a rollout with enable_rollout_routing_replay=True" in missing


def test_which_forwards_record_and_which_replay() -> None:
    from fsdp_runtime.trainers.verl.rows import way_of

    old, update = {"forward_only": True, "has_loss": False}, {"forward_only": False, "has_loss": True}
    assert [way_of("R2", **each, asked=None) for each in (old, update)] == ["record", "replay"]
    assert [way_of("R3", **each, asked=True) for each in (old, update)] == ["replay", "replay"]
    assert [way_of("R2", **each, asked=False) for each in (old, update)] == ["none", "none"]
    assert way_of("R2", forward_only=True, has_loss=True, asked=None) == "none"
    assert way_of("disabled", **update, asked=True) == "none"
