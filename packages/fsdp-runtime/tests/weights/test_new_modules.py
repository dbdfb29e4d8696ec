"""Reward models and critics from a language model: what the checkpoint lacks is named, and drawn when asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from fsdp_runtime import OptionError, load_weights, meta_device, parallelize, save_weights, stream_weights
from fsdp_runtime.errors import MismatchError, OtherRankError
from fsdp_runtime.weights import stored_source
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

_MESHES: list[dict[str, int]] = [{"tp": 2}, {"dp_shard": 2}]
_CAUSAL = "Qwen3ForCausalLM"


class Critic(nn.Module):
    """A language model, and a value head on its last hidden states."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        self.value_head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        output = self.policy(ids, output_hidden_states=True, use_cache=False)
        return output.logits, self.value_head(output.hidden_states[-1]).squeeze(-1)


def _checkpoint(folder: Path, architecture: str = _CAUSAL, **options: Any) -> Path:
    tiny_model(architecture, dtype=torch.float32, **options).save_pretrained(folder)
    return folder


def _on_meta(auto: Any, folder: Path) -> Any:
    with meta_device():
        return auto.from_config(AutoConfig.from_pretrained(folder, num_labels=1))


def _error(model: nn.Module, folder: Path, **options: Any) -> str:
    with pytest.raises((MismatchError, OptionError, OtherRankError)) as raised:
        load_weights(model, folder, **options)
    assert all(parameter.is_meta for parameter in model.parameters())
    return str(raised.value)


@pytest.mark.parametrize(
    ("auto", "expected"),
    [
        ("AutoModelForSequenceClassification", "load_weights(model, checkpoint, new_modules={'score': 0.02})"),
        ("AutoModelForTokenClassification", "load_weights(model, checkpoint, new_modules={'score': 0.02})"),
        ("AutoModelForQuestionAnswering", "prefix='transformer', new_modules={'qa_outputs': 0.02})"),
    ],
)
def test_new_head_is_named_with_the_option_that_draws_it(tmp_path: Path, auto: str, expected: str) -> None:
    assert expected in _error(_on_meta(getattr(transformers, auto), _checkpoint(tmp_path)), tmp_path)


def test_new_lm_head_of_a_checkpoint_of_a_classifier_is_named(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, "Qwen3ForSequenceClassification")
    assert "new_modules={'lm_head': 0.02}" in _error(_on_meta(AutoModelForCausalLM, folder), folder)


def _classifier(folder: Path, axes: dict[str, int]) -> tuple[dict[str, Tensor], Tensor]:
    model = _on_meta(AutoModelForSequenceClassification, folder)
    if axes:
        parallelize(model, mesh_for(axes))
    load_weights(model, folder, new_modules={"score": 0.02}, training=False)
    ids = torch.tensor([[5, 6, 7, 8], [9, 3, 2, 1]])
    return dict(stream_weights(model)), model(ids).logits.detach()


@pytest.mark.parametrize("axes", _MESHES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", [_CAUSAL, "Qwen3MoeForCausalLM"])
def test_new_classifier_equals_from_pretrained_but_for_its_head(
    two_ranks: RankPool, tmp_path: Path, axes: dict[str, int], tied: bool, architecture: str
) -> None:
    folder = _checkpoint(tmp_path, architecture, tied=tied)
    plain, logits = _classifier(folder, {})
    for values, found in two_ranks.run(_classifier, folder, axes):
        assert all(torch.equal(values[name], value) for name, value in plain.items())
        torch.testing.assert_close(found, logits)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    theirs.score.weight.data.copy_(plain["score.weight"])
    with torch.no_grad():
        torch.testing.assert_close(theirs(torch.tensor([[5, 6, 7, 8], [9, 3, 2, 1]])).logits, logits)
    assert 0.01 < plain["score.weight"].std() < 0.03


def test_prefix_and_heads_of_a_wrapper_are_named(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path)
    with meta_device():
        model = Critic(folder)
    message = _error(model, folder)
    call = "load_weights(model, checkpoint, prefix='policy', new_modules={'value_head': 0.02})"
    assert call in message
    assert "new_modules={'value_head': 0.02}" in _error(model, folder, prefix="policy")
    load_weights(model, folder, prefix="policy", new_modules={"value_head": 0.02})
    assert model.value_head[0].weight.eq(1).all()
    assert model.value_head[1].weight.std() > 0.01
    assert not model.value_head[1].bias.any()


class _TwoModels(nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.actor = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        self.critic = Critic(folder).policy


def test_several_models_in_a_wrapper_are_loaded_each_by_itself(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path)
    with meta_device():
        model = _TwoModels(folder)
    message = _error(model, folder)
    assert "load_weights(model.actor, checkpoint), load_weights(model.critic, checkpoint)" in message
    load_weights(model.actor, folder)
    load_weights(model.critic, folder)
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("in_full", [False, True])
def test_prefix_loads_the_converted_tensors_of_the_inner_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_full: bool
) -> None:
    reference = tiny_model("Qwen3MoeForCausalLM", dtype=torch.float32)
    reference.save_pretrained(tmp_path)
    if in_full:  # as a conversion that computes: it runs on full tensors
        trace = stored_source.trace_conversion
        monkeypatch.setattr(
            stored_source,
            "trace_conversion",
            lambda *args: {name: replace(spec, chunks=None) for name, spec in trace(*args).items()},
        )
    model = Critic(tmp_path)
    load_weights(model, tmp_path, prefix="policy", new_modules={"value_head": 0.02})
    expected, loaded = reference.state_dict(), model.policy.state_dict()
    assert expected.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_prefix_and_new_modules_that_are_no_modules_are_refused(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path)
    with meta_device():
        model = Critic(folder)
    assert "no module 'actor'; write a path such as policy, value_head" in _error(model, folder, prefix="actor")
    assert "no module 'score'" in _error(model, folder, new_modules={"score": 0.1})


def test_checkpoint_of_a_module_around_the_model_is_named(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "in")
    save_weights(Critic(folder), tmp_path / "critic")
    message = _error(_on_meta(AutoModelForCausalLM, folder), tmp_path / "critic")
    assert "save_weights(module.policy, directory)" in message


def test_missing_part_of_a_block_has_no_advice_to_draw_it(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path)
    file = folder / "model.safetensors"
    from safetensors.torch import save_file

    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file)
    assert "new_modules" not in _error(_on_meta(AutoModelForCausalLM, folder), folder)


def _critic(folder: Path, axes: dict[str, int], target: Path | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    with meta_device():
        model: nn.Module = Critic(folder)
    if axes:
        parallelize(model, mesh_for(axes), logits="full")
    load_weights(model, folder, prefix="policy", new_modules={"value_head": 0.02})
    outputs = [each.detach() for each in model(torch.tensor([[5, 6, 7, 8], [9, 3, 2, 1]]))]
    values = dict(stream_weights(model))
    if target is not None:
        save_weights(model.policy, target)
    return outputs, values


@pytest.mark.parametrize("axes", _MESHES, ids=str)
@pytest.mark.parametrize("architecture", [_CAUSAL, "Qwen3MoeForCausalLM"])
def test_prefix_loads_a_wrapper_as_one_process_does_and_saves_its_policy(
    two_ranks: RankPool, tmp_path: Path, axes: dict[str, int], architecture: str
) -> None:
    folder = _checkpoint(tmp_path / "in", architecture)
    outputs, values = _critic(folder, {}, None)
    for found, streamed in two_ranks.run(_critic, folder, axes, tmp_path / "out"):
        torch.testing.assert_close(found, outputs)
        assert all(torch.equal(streamed[name], value) for name, value in values.items())
    saved, stored = (load_file(each / "model.safetensors") for each in (tmp_path / "out", folder))
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], value) for name, value in stored.items())
    assert (tmp_path / "out" / "generation_config.json").exists()
