"""State of a model in pipeline stages: weights and training states are those of the single-process model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp_runtime import (
    load_weights,
    parallelize,
    save_weights,
    stream_weights,
)
from fsdp_runtime.steps.pipeline.step import Pipeline
from harness.models import tiny_config, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

#: Architecture, tied embeddings, mesh, and the step.
CASES: list[tuple[str, bool, dict[str, int], Pipeline]] = [
    ("LlamaForCausalLM", True, {"pp": 2, "tp": 2}, Pipeline()),
    ("Qwen3MoeForCausalLM", False, {"pp": 2, "dp_shard": 2}, Pipeline("interleaved1f1b")),
    ("Qwen3ForCausalLM", True, {"pp": 4}, Pipeline("gpipe")),
]


def _model(architecture: str, *, tied: bool = False, seed: int = 0) -> nn.Module:
    return tiny_model(architecture, tied=tied, seed=seed, num_hidden_layers=4)


def _empty(architecture: str, *, tied: bool) -> nn.Module:
    config = tiny_config(architecture, tied=tied, num_hidden_layers=4)
    with torch.device("meta"):
        return getattr(transformers, architecture)(config).to(torch.float64)


def _tensors_in(folder: Path) -> dict[str, Tensor]:
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    assert len(tensors) == sum(map(len, files)), "a tensor is in two files"
    return tensors


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not different
    assert {name: tensor.dtype for name, tensor in actual.items()} == {n: t.dtype for n, t in expected.items()}


def _loaded_saved_and_streamed(
    architecture: str, tied: bool, axes: dict[str, int], step: Pipeline, folder: Path
) -> tuple[int, int]:
    staged = parallelize(_empty(architecture, tied=tied), mesh_for(axes), steps=(step,))
    report = load_weights(staged, folder / "theirs")
    reference = _model(architecture, tied=tied)
    _assert_equal(dict(stream_weights(staged)), dict(stream_weights(reference)))
    rounded = dict(stream_weights(staged, dtype=torch.bfloat16, bucket_bytes=2**16))
    _assert_equal(rounded, dict(stream_weights(reference, dtype=torch.bfloat16)))
    save_weights(staged, folder / "ours", max_shard_size=300_000)
    return report.tensors, report.bytes_read


@pytest.mark.parametrize(("architecture", "tied", "axes", "step"), CASES, ids=str)
def test_weights_of_stages_equal_the_checkpoint_of_save_pretrained(
    four_ranks: RankPool, tmp_path: Path, architecture: str, tied: bool, axes: dict[str, int], step: Pipeline
) -> None:
    reference: Any = _model(architecture, tied=tied)
    reference.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    reports = four_ranks.run(_loaded_saved_and_streamed, architecture, tied, axes, step, tmp_path)
    _assert_equal(_tensors_in(tmp_path / "ours"), expected)
    reloaded, problems = type(reference).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(problems.values())
    _assert_equal(reloaded.state_dict(), reference.state_dict())
    assert {tensors for tensors, _ in reports} == {len(reference.state_dict()) - tied}
    total = sum(tensor.nbytes for tensor in expected.values())
    assert all(0 < nbytes < total for _, nbytes in reports)
