"""Files beside the weights: a model that load_weights has filled is saved with those of its checkpoint."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from fsdp_runtime import load_weights, meta_device, parallelize, save_weights
from fsdp_runtime.trainers.model_source import ModelSource
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

_TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"}
_WEIGHTS = {"config.json", "generation_config.json", "model.safetensors"}


def _tokenizer(size: int = 128, **options: Any) -> PreTrainedTokenizerFast:
    words = WordLevel({f"t{index}": index for index in range(size)}, unk_token="t1")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="t1", pad_token="t0", **options)
    tokenizer.chat_template = {"default": "{{ messages }} default", "tools": "{{ messages }} tools"}
    return tokenizer


def _checkpoint(folder: Path, **sizes: Any) -> Path:
    model = tiny_model("Qwen3ForCausalLM", dtype=torch.float32, **sizes)
    model.generation_config = GenerationConfig(eos_token_id=[5, 7], do_sample=True, temperature=0.6)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    for name in ("processor_config.json", "preprocessor_config.json", "optimizer.pt", "notes.json", "vocab.json"):
        (folder / name).write_text(json.dumps({"name": name}))
    (folder / "modeling_foreign.py").write_text("")
    return folder


def _files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def _on_meta(folder: Path, **options: Any) -> Any:
    with meta_device():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **options), **options)


_COPIED = _WEIGHTS | _TOKENIZER | {"vocab.json", "processor_config.json", "preprocessor_config.json"}


def _save_by_road(road: str, source: Path, target: Path, **options: Any) -> list[int]:
    mesh = mesh_for({"tp": 2})
    model = AutoModelForCausalLM.from_pretrained(source) if road == "from_pretrained" else _on_meta(source)
    parallelize(model, mesh)
    if road == "load_weights":
        load_weights(model, source)
    saved: Any = save_weights(model, target, **options)
    if options.get("asynchronous"):
        saved.wait()
    return model.generation_config.eos_token_id  # type: ignore[no-any-return]


@pytest.mark.parametrize("road", ["load_weights", "from_pretrained"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_companion_files_arrive_and_no_foreign_ones(
    two_ranks: RankPool, tmp_path: Path, road: str, asynchronous: bool
) -> None:
    source, target = _checkpoint(tmp_path / "in"), tmp_path / "out"
    assert two_ranks.run(_save_by_road, road, source, target, asynchronous=asynchronous) == [[5, 7], [5, 7]]
    assert _files(target) == _COPIED
    for name in _TOKENIZER | {"vocab.json", "processor_config.json"}:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((folder / name).read_text()) for folder in (target, tmp_path / "theirs"))
        assert ours == theirs
    assert AutoTokenizer.from_pretrained(target).chat_template == AutoTokenizer.from_pretrained(source).chat_template


def test_companion_files_of_a_second_save_and_of_a_save_in_place_are_the_same(tmp_path: Path) -> None:
    source = _checkpoint(tmp_path / "in")
    before = {name: (source / name).read_bytes() for name in _files(source)}
    model = _on_meta(source)
    load_weights(model, source)
    for target in (tmp_path / "out", tmp_path / "out", source):
        save_weights(model, target)
    assert _files(tmp_path / "out") == _COPIED
    assert _files(source) == before.keys()
    assert [name for name in before if (source / name).read_bytes() != before[name] and name not in _WEIGHTS] == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_companion_files_that_the_user_has_saved_stay(tmp_path: Path, asynchronous: bool) -> None:
    source, target = _checkpoint(tmp_path / "in"), tmp_path / "out"
    model = _on_meta(source)
    load_weights(model, source)
    own = _tokenizer(eos_token="t9")
    own.chat_template = None
    if asynchronous:
        saving = save_weights(model, target, asynchronous=True)
        own.save_pretrained(target)
        saving.wait()
    else:
        own.save_pretrained(target)
        save_weights(model, target)
    loaded = AutoTokenizer.from_pretrained(target)
    assert (loaded.eos_token, loaded.chat_template) == ("t9", None)
    assert {"processor_config.json", "preprocessor_config.json"} < _files(target)
    assert not any("chat_template" in name for name in _files(target))


def test_companion_files_leave_a_tokenizer_and_processor_saved_before_alone(tmp_path: Path) -> None:
    source, target = _checkpoint(tmp_path / "in"), tmp_path / "out"
    for name in ("tokenizer_config.json", "processor_config.json"):  # files that older releases did not write
        (source / name).unlink()
    target.mkdir()
    (target / "processor_config.json").write_text("{}")
    own = _tokenizer()
    own.chat_template = None
    own.save_pretrained(target)
    model = _on_meta(source)
    load_weights(model, source)
    save_weights(model, target)
    assert _files(target) == _WEIGHTS | {"tokenizer.json", "tokenizer_config.json", "processor_config.json"}


def test_legacy_files_that_would_contradict_a_later_tokenizer_are_left_out(tmp_path: Path) -> None:
    source, target = _checkpoint(tmp_path / "in"), tmp_path / "out"
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": {}}))
    (source / "special_tokens_map.json").write_text(json.dumps({"pad_token": "t3"}))
    model = _on_meta(source)
    load_weights(model, source)
    save_weights(model, target)
    assert "special_tokens_map.json" not in _files(target)
    _tokenizer().save_pretrained(target)
    assert AutoTokenizer.from_pretrained(target).pad_token == "t0"


def test_a_source_that_is_gone_or_has_another_vocabulary_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = _checkpoint(tmp_path / "in")
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(144)
    with caplog.at_level(logging.WARNING):
        save_weights(model, tmp_path / "resized")
    assert "vocabulary of 144" in caplog.text
    assert "tokenizer.save_pretrained" in caplog.text
    assert _files(tmp_path / "resized") == _WEIGHTS | {"processor_config.json", "preprocessor_config.json"}
    caplog.clear()
    loaded = _on_meta(source)
    load_weights(loaded, source)
    shutil.rmtree(source)
    with caplog.at_level(logging.WARNING):
        save_weights(loaded, tmp_path / "out")
    assert str(source) in caplog.text
    assert "tokenizer.save_pretrained" in caplog.text
    assert _files(tmp_path / "out") == _WEIGHTS
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [5, 7]


_CODE = {
    "configuration_own.py": "from transformers import Qwen3Config\n\nclass OwnConfig(Qwen3Config):\n"
    "    model_type = 'own'\n",
    "modeling_own.py": "from transformers import Qwen3ForCausalLM\nfrom .configuration_own import OwnConfig\n"
    "from .helper_own import VALUE\n\nclass OwnForCausalLM(Qwen3ForCausalLM):\n    config_class = OwnConfig\n",
    "helper_own.py": "VALUE = 1\n",
    "tokenization_own.py": "from transformers import PreTrainedTokenizerFast\n\n"
    "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n",
}


@pytest.mark.parametrize("road", ["load_weights", "from_pretrained"])
def test_remote_code_of_model_and_tokenizer_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, road: str) -> None:
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub", "transformers.utils"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    source, target = _checkpoint(tmp_path / "own_model"), tmp_path / "out"
    for name, code in _CODE.items():
        (source / name).write_text(code)
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    for name, entries in {
        "config.json": {"model_type": "own", "auto_map": classes},
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}},
    }.items():
        (source / name).write_text(json.dumps({**json.loads((source / name).read_text()), **entries}))
    if road == "load_weights":
        model = _on_meta(source, trust_remote_code=True)
        load_weights(model, source)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    save_weights(model, target)
    assert {file for file in _files(target) if file.endswith(".py")} == {*_CODE}
    loaded = AutoModelForCausalLM.from_pretrained(target, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"
    assert loaded.generation_config.eos_token_id == [5, 7]


def _cached(root: Path, **changes: Callable[[Path], None]) -> Path:
    snapshot = root / "models--someone--tiny" / "snapshots" / ("0" * 40)
    _checkpoint(snapshot)
    (root / "models--someone--tiny" / "refs").mkdir()
    (root / "models--someone--tiny" / "refs" / "main").write_text("0" * 40)
    return snapshot


@pytest.mark.parametrize("road", ["load_weights", "from_pretrained"])
def test_companion_files_of_a_hub_id_come_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, road: str
) -> None:
    snapshot = _cached(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = _on_meta(snapshot) if road == "load_weights" else AutoModelForCausalLM.from_pretrained(snapshot)
    if road == "load_weights":
        load_weights(model, "someone/tiny")
    else:
        model.config.name_or_path = "someone/tiny"
    save_weights(model, tmp_path / "out")
    assert _files(tmp_path / "out") == _COPIED


def test_a_hub_id_of_which_the_cache_has_the_config_alone_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = _cached(tmp_path / "hub")
    (snapshot / "model.safetensors").rename(tmp_path / "model.safetensors")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached, asked = huggingface_hub.snapshot_download, []

    def download(repository: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        if not local_files_only:
            asked.append(allow_patterns)
            (tmp_path / "model.safetensors").rename(snapshot / "model.safetensors")
        return cached(repository, allow_patterns=allow_patterns, local_files_only=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = _on_meta(snapshot)
    load_weights(model, "someone/tiny")
    (patterns,) = asked
    assert {"*.safetensors", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= {*patterns}
    assert model.generation_config.eos_token_id == [5, 7]


def _trainer_source(source: Path, target: Path) -> list[int]:
    model = ModelSource(mesh_for({"dp_shard": 2}), {}).load(str(source))
    save_weights(model, target)
    return model.generation_config.eos_token_id  # type: ignore[no-any-return,union-attr,return-value]


def test_companion_files_of_a_model_that_a_trainer_loads_arrive(two_ranks: RankPool, tmp_path: Path) -> None:
    source = _checkpoint(tmp_path / "in")
    assert two_ranks.run(_trainer_source, source, tmp_path / "out") == [[5, 7], [5, 7]]
    assert _files(tmp_path / "out") == _COPIED


def test_companion_files_are_no_part_of_other_modules(tmp_path: Path) -> None:
    source = _checkpoint(tmp_path / "in")

    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = transformers.AutoModelForCausalLM.from_pretrained(source)

    save_weights(Actor(), tmp_path / "out")
    assert _files(tmp_path / "out") == {"model.safetensors"}
