"""Multi-token heads are the same bits after a load and a save, in a model that does not know them."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coverage.table import coverage_entries, row_or_skip, tiny_model
from fsdp_runtime import MeshSpec, load_weights, parallelize, save_weights, stream_weights
from fsdp_runtime.steps import MultiTokenHeads
from fsdp_runtime.weights import multi_token_weights
from harness.parity import mesh_for
from harness.ranks import RankPool

#: Names of heads, by the architectures that store them so.
HEADS = {
    "qwen3_next": ("mtp.layers.0.self_attn.q_proj.weight", "mtp.fc.weight", "mtp.norm.weight"),
    "deepseek_v3": ("model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight", "model.layers.2.mlp.gate.weight"),
    "glm4_moe": ("model.layers.92.eh_proj.weight", "model.layers.92.shared_head.head.weight"),
}


def _checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Save a model with multi-token heads beside it, in two files, and return the heads."""
    model = tiny_model(coverage_entries()[name])
    model.save_pretrained(folder)
    draw = torch.Generator().manual_seed(3)
    heads = {head: torch.randn(4, 5 + place, generator=draw).to(dtype) for place, head in enumerate(HEADS[name])}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    save_file(heads, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    index = {
        key: f"model-0000{number}-of-00002.safetensors"
        for number in (1, 2)
        for key in load_file(folder / f"model-0000{number}-of-00002.safetensors")
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return heads


def _loaded(name: str, folder: Path, axes: dict[str, int] | None = None) -> Any:
    model = tiny_model(coverage_entries()[name])
    parallelize(model, MeshSpec(**(axes or {})).build(device_type="cpu"))
    load_weights(model, folder)
    return model


def _saved(name: str, folder: Path, target: Path, axes: dict[str, int], options: dict[str, Any]) -> dict[str, Tensor]:
    written = save_weights(_loaded(name, folder, axes), target, **options)
    if options.get("asynchronous"):
        written.wait()  # type: ignore[attr-defined]
    return {key: tensor for file in target.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("qwen3_next", {"tp": 2}, {}),
        ("deepseek_v3", {"dp_shard": 2}, {"dtype": torch.float32, "max_shard_size": 20_000, "asynchronous": True}),
        ("glm4_moe", {"tp": 2}, {"max_shard_size": "1MB"}),
    ],
)
def test_save_copies_multi_token_heads_bit_for_bit(
    two_ranks: RankPool, tmp_path: Path, name: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    heads = _checkpoint(name, tmp_path / "from")
    known = set(load_file(tmp_path / "from" / "model-00001-of-00002.safetensors"))
    for saved in two_ranks.run(_saved, name, tmp_path / "from", tmp_path / "to", axes, options):
        assert saved.keys() == known | heads.keys()
        for head, expected in heads.items():
            assert saved[head].dtype == expected.dtype
            assert torch.equal(saved[head], expected)


def test_multi_token_weights_are_in_the_checkpoint_of_a_second_save(tmp_path: Path) -> None:
    heads = _checkpoint("qwen3_next", tmp_path / "from")
    model = _loaded("qwen3_next", tmp_path / "from")
    save_weights(model, tmp_path / "from")  # over its own source
    again = dict(multi_token_weights(_loaded("qwen3_next", tmp_path / "from")))
    assert again.keys() == heads.keys()
    assert all(torch.equal(again[head], expected) for head, expected in heads.items())


@pytest.mark.parametrize("change", ["vocabulary", "packed", "names"])
def test_save_leaves_heads_out_that_do_not_fit_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    packed = torch.float8_e4m3fn if change == "packed" else torch.bfloat16
    heads = _checkpoint("qwen3_next", tmp_path / "from", packed)
    model = _loaded("qwen3_next", tmp_path / "from")
    if change == "vocabulary":
        model.config.vocab_size += 1
    with caplog.at_level(logging.WARNING):
        save_weights(model, tmp_path / "to", names="model" if change == "names" else "checkpoint")
    assert not heads.keys() & load_file(tmp_path / "to" / "model.safetensors").keys()
    assert ("multi-token heads" in caplog.text) == (change != "names")


def test_save_of_a_shallower_model_leaves_deeper_blocks_out(tmp_path: Path) -> None:
    model = tiny_model(coverage_entries()["deepseek_v3"])
    model.save_pretrained(tmp_path / "from")
    shallow = tiny_model(coverage_entries()["deepseek_v3"])
    shallow.config.num_hidden_layers = 1
    del shallow.model.layers[1]
    load_weights(shallow, tmp_path / "from")
    save_weights(shallow, tmp_path / "to")
    assert not [name for name in load_file(tmp_path / "to" / "model.safetensors") if "layers.1." in name]


def _trained(name: str, source: Path, target: Path, axes: dict[str, int]) -> tuple[dict[str, Tensor], int]:
    """Load trained heads on a mesh, save and stream them; the streamed tensors, and the number of copied ones."""
    model = tiny_model(row_or_skip(name))
    MultiTokenHeads(model)
    parallelize(model, mesh_for(axes))
    load_weights(model, source)
    save_weights(model, target)
    return dict(stream_weights(model)), len(list(multi_token_weights(model)))


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("deepseek_v3", "model.layers.2.eh_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("hy_v3", "model.layers.2.final_layernorm.weight"),
        ("mimo_v2_flash", "model.mtp.layers.0.pre_mlp_layernorm.weight"),
    ],
)
def test_save_and_stream_of_trained_heads_have_the_names_of_the_checkpoint(
    two_ranks: RankPool, tmp_path: Path, name: str, head: str
) -> None:
    model = tiny_model(row_or_skip(name))
    MultiTokenHeads(model)
    save_weights(model, tmp_path / "from")
    expected = load_file(tmp_path / "from" / "model.safetensors")
    assert head in expected
    # A copy of the embedding beside the head is replaced by the shared one.
    beside = (
        {"model.layers.2.embed_tokens.weight": expected["model.embed_tokens.weight"].clone()} if ".2." in head else {}
    )
    save_file(expected | beside, tmp_path / "from" / "model.safetensors", {"format": "pt"})
    for streamed, copied in two_ranks.run(_trained, name, tmp_path / "from", tmp_path / "to", {"tp": 2}):
        saved = load_file(tmp_path / "to" / "model.safetensors")
        assert saved.keys() == streamed.keys() == expected.keys()
        assert not [key for key in expected if not torch.equal(saved[key], expected[key])]
        assert not [key for key in expected if not torch.equal(streamed[key], expected[key])]
        assert copied == 0


@pytest.mark.parametrize("name", ["deepseek_v3", "mimo_v2_flash"])
def test_save_copies_heads_beyond_the_trained_ones(tmp_path: Path, name: str) -> None:
    model = tiny_model(row_or_skip(name))
    MultiTokenHeads(model, 2)
    save_weights(model, tmp_path / "from")
    expected = load_file(tmp_path / "from" / "model.safetensors")
    one = tiny_model(coverage_entries()[name])
    MultiTokenHeads(one, 1)
    load_weights(one, tmp_path / "from")
    save_weights(one, tmp_path / "to")
    saved = load_file(tmp_path / "to" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert not [key for key in expected if not torch.equal(saved[key], expected[key])]
    assert 0 < len(list(multi_token_weights(one))) < len(expected)


def _classes_with_heads() -> list[tuple[type, str]]:
    """transformers' classes that drop heads by their word, and a name that the pattern drops."""
    names = ("model.mtp.layers.0.eh_proj.weight", "mtp.layers.0.fc.weight", "model.mtp_layers.0.eh_proj.weight")
    names += ("model.mtp_block.0.mlp.up_proj.weight", "llm.mtp.norm.weight", "mtp_dspark.norm.weight")
    classes = {type(tiny_model(row_or_skip(name))) for name in WITH_WORD}
    patterns = [(cls, re.compile(pattern)) for cls in classes for pattern in cls._keys_to_ignore_on_load_unexpected]
    return [(cls, name) for cls, pattern in patterns for name in names if pattern.search(name)]


#: Rows with a class that drops heads named by a word.
WITH_WORD = (
    "ernie4_5_moe",
    "exaone_moe",
    "hy_v4",
    "inkling_text",
    "longcat_flash",
    "mellum",
    "mimo_v2_flash",
    "nemotron_h",
)


def test_save_copies_heads_that_any_class_drops(tmp_path: Path) -> None:
    dropped = _classes_with_heads()
    assert {cls for cls, _ in dropped} == {type(tiny_model(coverage_entries()[name])) for name in WITH_WORD}
    for number, (cls, head) in enumerate(dropped):
        row = next(name for name in WITH_WORD if type(tiny_model(coverage_entries()[name])) is cls)
        model, folder = tiny_model(coverage_entries()[row]), tmp_path / str(number)
        save_weights(model, folder)
        tensors = load_file(folder / "model.safetensors") | {head: torch.randn(3, 2).to(torch.bfloat16)}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        load_weights(model, folder)
        save_weights(model, tmp_path / f"to {number}")
        assert torch.equal(load_file(tmp_path / f"to {number}" / "model.safetensors")[head], tensors[head]), head
