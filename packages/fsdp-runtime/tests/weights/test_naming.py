"""Names: renamed checkpoints load, and are streamed under their stored names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_runtime import BackendError, WeightsError
from fsdp_runtime.weights import load_weights, save_weights, stream_weights
from harness.models import tiny_config, tiny_model


def _model(architecture: str = "LlamaForCausalLM", *, seed: int = 0, **options: Any) -> nn.Module:
    return tiny_model(architecture, dtype=torch.float32, seed=seed, **options)


def _assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    wanted = other.state_dict()
    assert [name for name, tensor in one.state_dict().items() if not torch.equal(tensor, wanted[name])] == []


@pytest.mark.parametrize("original_format", [True, False])
def test_renamed_checkpoints_load_and_are_streamed_under_their_stored_names(
    tmp_path: Path, original_format: bool
) -> None:
    reference = _model("Gemma3ForConditionalGeneration")
    reference.save_pretrained(tmp_path, save_original_format=original_format)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("language_model.model.norm.weight" in stored) is original_format
    model = _model("Gemma3ForConditionalGeneration", seed=1)
    load_weights(model, tmp_path)
    _assert_same_weights(model, reference)
    assert {name for name, _ in stream_weights(model)} == stored.keys()


def test_a_base_models_checkpoint_loads_into_a_model_with_a_head(tmp_path: Path) -> None:
    reference = _model(tied=True)
    reference.model.save_pretrained(tmp_path)
    assert "norm.weight" in load_file(tmp_path / "model.safetensors")
    model = _model(tied=True, seed=1)
    load_weights(model, tmp_path)
    _assert_same_weights(model, reference)


@pytest.mark.parametrize("stored_as", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_loads_from_either_name(tmp_path: Path, stored_as: str) -> None:
    reference = _model(tied=True)
    tensors: dict[str, Tensor] = {k: v for k, v in reference.state_dict().items() if "lm_head" not in k}
    tensors[stored_as] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    model = _model(tied=True, seed=1)
    load_weights(model, tmp_path)
    _assert_same_weights(model, reference)


def test_a_tied_checkpoint_lacks_the_untied_head(tmp_path: Path) -> None:
    _model(tied=True).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=r"1 tensors:\n  lm_head\.weight: missing"):
        load_weights(_model(tied=False), tmp_path)


def test_names_do_not_contain_wrappers() -> None:
    expected = [name for name, _ in stream_weights(_model())]
    model = _model()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    assert [name for name, _ in stream_weights(torch.compile(model), names="model")] == expected


def test_other_models_do_not_need_transformers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[1].weight.detach())
    save_weights(model, tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("release", ["4.57.6", "5.5.4"])
def test_an_older_transformers_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    model = _model()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("fsdp_runtime._transformers_compat.conversions.installed_release", lambda: release)
    for use in (lambda: load_weights(model, tmp_path), lambda: list(stream_weights(model))):
        with pytest.raises(BackendError, match=rf"transformers {release} .*transformers>=5\.10"):
            use()


def test_the_config_of_the_model_is_not_changed_by_saving(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(tiny_config("LlamaForCausalLM"))
    before = model.config.to_dict()
    save_weights(model, tmp_path, dtype=torch.bfloat16)
    assert model.config.to_dict() == before
