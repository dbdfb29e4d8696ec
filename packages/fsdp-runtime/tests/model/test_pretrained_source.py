"""Generation configs: a checkpoint's takes the place of a default one, and what the user has set stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from fsdp_runtime import (
    init_adapters,
    load_training_state,
    load_weights,
    meta_device,
    parallelize,
    save_training_state,
    save_weights,
)
from fsdp_runtime.errors import CheckpointError, OtherRankError
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

_STORED = {"eos_token_id": [5, 7], "do_sample": True, "temperature": 0.6}


def _checkpoint(folder: Path, **settings: Any) -> Path:
    model = tiny_model("Qwen3ForCausalLM")
    model.generation_config = GenerationConfig(**(settings or _STORED))
    model.save_pretrained(folder)
    return folder


def _on_meta(folder: Path) -> Any:
    with meta_device():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def _settings(config: Any) -> tuple[Any, ...]:
    return config.eos_token_id, config.temperature, config.max_new_tokens, config.pad_token_id


def _nothing(model: Any) -> None:
    return None


def _set_one_field(model: Any) -> None:
    model.generation_config.max_new_tokens = 9


def _set_a_config(model: Any) -> None:
    model.generation_config = GenerationConfig(eos_token_id=3)


def _set_padding_of_the_model(model: Any) -> None:
    model.config.pad_token_id = 4


def _set_both(model: Any) -> None:
    _set_padding_of_the_model(model)
    _set_one_field(model)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_nothing, ([5, 7], 0.6, None, None)),
        (_set_one_field, ([5, 7], 0.6, 9, None)),
        (_set_a_config, (3, None, None, None)),
        (_set_padding_of_the_model, ([5, 7], 0.6, None, None)),
        (_set_both, ([5, 7], 0.6, 9, None)),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_generation_config_of_the_user_wins_over_the_checkpoint(
    tmp_path: Path, change: Callable[[Any], None], expected: tuple[Any, ...], when: str
) -> None:
    model = _on_meta(_checkpoint(tmp_path / "in"))
    if when == "before":
        change(model)
    load_weights(model, tmp_path / "in")
    if when == "after":
        change(model)
    assert _settings(model.generation_config) == expected
    save_weights(model, tmp_path / "out")
    assert _settings(GenerationConfig.from_pretrained(tmp_path / "out")) == expected
    load_weights(model, tmp_path / "in")
    assert _settings(model.generation_config) == expected


def test_generation_config_of_a_second_checkpoint_replaces_that_of_the_first(tmp_path: Path) -> None:
    model = _on_meta(_checkpoint(tmp_path / "base"))
    load_weights(model, tmp_path / "base")
    model.generation_config.max_new_tokens = 9
    load_weights(model, _checkpoint(tmp_path / "chat", eos_token_id=[6]))
    assert _settings(model.generation_config) == ([6], None, 9, None)


def test_generation_config_without_a_file_comes_from_the_config(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "in")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 8, "max_length": 77}))
    theirs = AutoModelForCausalLM.from_pretrained(folder).generation_config
    model = _on_meta(folder)
    load_weights(model, folder)
    assert model.generation_config == theirs
    assert (model.generation_config.eos_token_id, model.generation_config.max_length) == (8, 77)


def test_generation_config_that_transformers_finds_invalid_is_saved_as_it_is(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "in")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "do_sample": False}))
    model = _on_meta(folder)
    load_weights(model, folder)
    model.generation_config.max_new_tokens = 9
    save_weights(model, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (saved["temperature"], saved["max_new_tokens"]) == (0.6, 9)


def _load_error(folder: Path) -> str:
    model = parallelize(_on_meta(folder), mesh_for({"tp": 2}))
    with pytest.raises((CheckpointError, OtherRankError)) as raised:
        load_weights(model, folder)
    assert next(model.parameters()).is_meta
    return str(raised.value)


def test_generation_config_that_is_damaged_is_named_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "in")
    (folder / "generation_config.json").write_text("{")
    assert all("generation_config.json cannot be read" in message for message in two_ranks.run(_load_error, folder))


def _resumed(folder: Path, state: Path) -> Any:
    mesh = mesh_for({"dp_shard": 2})
    model = parallelize(_on_meta(folder), mesh)
    load_weights(model, folder)
    save_training_state(state, model, step=1)
    resumed = parallelize(_on_meta(folder), mesh)
    load_training_state(state, resumed)
    return _settings(resumed.generation_config)


def test_generation_config_of_a_resumed_model_is_that_of_its_checkpoint(two_ranks: RankPool, tmp_path: Path) -> None:
    found = two_ranks.run(_resumed, _checkpoint(tmp_path / "in"), tmp_path / "state")
    assert found == [([5, 7], 0.6, None, None)] * 2


def test_generation_config_of_a_model_with_adapters_is_the_checkpoints(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "in")
    with meta_device():
        model = get_peft_model(
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), LoraConfig(target_modules=["q_proj"])
        )
    init_adapters(model)
    load_weights(model, folder)
    assert model.generation_config.eos_token_id == [5, 7]
    save_weights(model, tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [5, 7]


def test_generation_config_of_a_classifier_is_left_out(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "in")
    with meta_device():
        model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder, num_labels=1))
    load_weights(model, folder, new_modules={"score": 0.02})
    save_weights(model, tmp_path / "out")
    assert not (tmp_path / "out" / "generation_config.json").exists()
