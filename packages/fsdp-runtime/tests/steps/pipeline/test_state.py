"""State of a model in pipeline stages: weights and training states are those of the single-process model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fsdp_runtime import (
    assert_finite_gradients,
    assert_replicas_equal,
    load_adapter,
    load_weights,
    meta_device,
    offload,
    onload,
    parallelize,
    save_adapter,
    save_weights,
    stream_weights,
    unsharded,
)
from fsdp_runtime.errors import GradientError
from fsdp_runtime.optim import Muon
from fsdp_runtime.steps.pipeline.schedule import forward_backward
from fsdp_runtime.steps.pipeline.step import Pipeline
from fsdp_runtime.sync import ModelShards, WeightExport, WeightSync, digest, execute_transfer
from fsdp_runtime.training_state import load_training_state, save_training_state
from fsdp_runtime.weights import Quantization
from harness.models import tiny_config, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool, RanksFailed
from tp_plans.transfer import plan_transfer

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


def _load(folder: Path, **options: Any) -> tuple[int, tuple[str, ...]]:
    staged = parallelize(_empty("LlamaForCausalLM", tied=False), mesh_for({"pp": 2}), steps=(Pipeline(),))
    report = load_weights(staged, folder, **options)
    return report.tensors, report.unexpected


def test_load_of_stages_reports_missing_and_unexpected_tensors_on_every_rank(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in _model("LlamaForCausalLM").state_dict().items()}
    save_file({**tensors, "extra": torch.ones(2)}, tmp_path / "model.safetensors")
    assert two_ranks.run(_load, tmp_path) == [(len(tensors), ("extra",))] * 2
    with pytest.raises(RanksFailed) as refused:
        two_ranks.run(_load, tmp_path, strict=True)
    assert {error.type_name for error in refused.value.errors.values()} == {"MismatchError"}
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"):
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, tmp_path / "model.safetensors")
        with pytest.raises(RanksFailed) as failed:
            two_ranks.run(_load, tmp_path)
        assert all(f"{name}: missing" in error.message for error in failed.value.errors.values())
        assert len(failed.value.errors) == 2


def _trainer(axes: dict[str, int], *, seed: int = 0) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Return a tied mixture on a mesh, with an optimizer of two groups and one of the norms."""
    steps = {1: (), 2: (Pipeline("interleaved1f1b"),), 4: (Pipeline(),)}[axes.get("pp", 1)]
    model = parallelize(_model("Qwen3MoeForCausalLM", tied=True, seed=seed), mesh_for(axes), steps=steps)
    parts: dict[str, list[nn.Parameter]] = {"norms": [], "embedding": [], "matrices": []}
    for name, parameter in model.named_parameters():
        parts["norms" if "norm" in name else "embedding" if "embed" in name else "matrices"].append(parameter)
    groups = [{"params": parts["matrices"]}, {"params": parts["embedding"], "lr": 0.02}]
    return model, [torch.optim.AdamW(groups, lr=0.01), torch.optim.SGD(parts["norms"], lr=0.1, momentum=0.9)]


def _stepped(model: nn.Module, optimizers: list[torch.optim.Optimizer], axes: dict[str, int]) -> None:
    ids = torch.randint(3, 131, (4, 1, 6), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": row, "labels": row} for row in ids]
    if axes.get("pp", 1) > 1:
        forward_backward(model, batches)
    else:
        for batch in batches:
            (model(**batch).loss / 4).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _saved_after_a_step(axes: dict[str, int], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizers = _trainer(axes)
    _stepped(model, optimizers, axes)
    save_training_state(folder, model, optimizers, step=1, extra={"tokens": 24})
    at_save = {name: tensor.clone() for name, tensor in stream_weights(model)}
    _stepped(model, optimizers, axes)
    return at_save, dict(stream_weights(model))


def _resumed(axes: dict[str, int], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    model, optimizers = _trainer(axes, seed=1)
    state = load_training_state(folder, model, optimizers)
    assert state.extra == {"tokens": 24}
    at_load = {name: tensor.clone() for name, tensor in stream_weights(model)}
    _stepped(model, optimizers, axes)
    return at_load, dict(stream_weights(model)), state.rng_restored


@pytest.mark.parametrize(
    ("saved_on", "resumed_on"),
    [
        ({"pp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}),
        ({"dp_shard": 4}, {"pp": 4}),
        ({"pp": 4}, {"pp": 4}),
    ],
    ids=str,
)
def test_training_state_of_stages_resumes_on_any_mesh(
    four_ranks: RankPool, tmp_path: Path, saved_on: dict[str, int], resumed_on: dict[str, int]
) -> None:
    saved = four_ranks.run(_saved_after_a_step, saved_on, tmp_path)
    resumed = four_ranks.run(_resumed, resumed_on, tmp_path)
    for (at_save, after), (at_load, again, has_generators) in zip(saved, resumed, strict=True):
        _assert_equal(at_load, at_save)
        for name, tensor in after.items():
            torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-7)
        assert has_generators == (saved_on == resumed_on)


def _synchronized(axes: dict[str, int]) -> None:
    """Send the weights of stages to a model on ``tp``, twice, and to one rank of each stage."""
    staged, optimizers = _trainer(axes)
    engine = parallelize(_model("Qwen3MoeForCausalLM", tied=True, seed=1), mesh_for({"tp": 4}))
    shards, target = ModelShards(staged), ModelShards(engine)
    plan = plan_transfer(shards.layout, target.layout)
    sync = WeightSync(plan, source=shards, destination=target.local)
    for version in (1, 2):
        sync.update(version)
        expected = dict(stream_weights(staged))
        _assert_equal(dict(stream_weights(engine)), expected)
        _stepped(staged, optimizers, axes)
    expected = dict(stream_weights(staged))
    for rank in (0, 3):
        buckets = WeightExport(bucket_bytes=2**16).prepare(staged).buckets(to=rank)
        weights = {name: tensor for bucket in buckets for name, tensor in bucket}
        assert list(weights) == (list(expected) if rank == torch.distributed.get_rank() else [])
        _assert_equal(weights, expected if weights else {})


@pytest.mark.parametrize("axes", [{"pp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_weight_sync_of_stages_sends_every_weight(four_ranks: RankPool, axes: dict[str, int]) -> None:
    four_ranks.run(_synchronized, axes)


def _checked(axes: dict[str, int]) -> str:
    staged, optimizers = _trainer(axes)
    reference = _model("Qwen3MoeForCausalLM", tied=True)
    for export in (
        WeightExport(),
        WeightExport(quantize=Quantization(format="fp8")),
        WeightExport(dtype=torch.bfloat16),
    ):
        assert digest(staged, export=export) == digest(reference, export=export)
    assert_replicas_equal(staged, mesh_for(axes))
    with unsharded(staged):
        _assert_equal(dict(stream_weights(staged)), dict(stream_weights(reference)))
    _stepped(staged, optimizers, axes)
    before = digest(staged)
    offload(staged)
    onload(staged)
    assert digest(staged) == before
    for name, parameter in staged.named_parameters():
        parameter.grad = torch.full_like(parameter, float("nan")) if name == "model.norm.weight" else None
    with pytest.raises(GradientError) as caught:
        assert_finite_gradients(staged)
    return str(caught.value)


def test_digests_and_checks_of_stages_count_the_whole_model(four_ranks: RankPool) -> None:
    messages = four_ranks.run(_checked, {"pp": 2, "dp_shard": 2})
    assert "1 parameters" in messages[0]
    assert "model.norm.weight" in messages[0]
    assert len({*messages}) == 1


def _muon_steps(axes: dict[str, int], folder: Path) -> float:
    staged, _ = _trainer(axes)
    reference = _model("Qwen3MoeForCausalLM", tied=True)
    for model, mesh in ((staged, axes), (reference, {})):
        optimizer = Muon(model)
        for _ in range(2):
            _stepped(model, [optimizer], mesh)
        if model is staged:
            save_training_state(folder, model, optimizer, step=2)
    resumed = parallelize(_model("Qwen3MoeForCausalLM", tied=True, seed=1), mesh_for({"tp": 4}))
    load_training_state(folder, resumed, Muon(resumed))
    weights, expected = dict(stream_weights(staged)), dict(stream_weights(reference))
    _assert_equal(dict(stream_weights(resumed)), weights)
    return max(float((weights[name] - tensor).abs().max()) for name, tensor in expected.items())


def test_muon_steps_of_stages_equal_the_single_process(four_ranks: RankPool, tmp_path: Path) -> None:
    assert max(four_ranks.run(_muon_steps, {"pp": 2, "tp": 2}, tmp_path)) < 1e-9


ADAPTER = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])


def _adapted(seed: int) -> Any:
    model = peft.get_peft_model(_model("LlamaForCausalLM"), copy.deepcopy(ADAPTER))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(generator=generator)
    return model


def _adapters(axes: dict[str, int], folder: Path) -> None:
    """Save an adapter, load it into stages without values, and send it to a model on ``tp``."""
    reference = _adapted(0)
    with meta_device():
        empty = peft.get_peft_model(_empty("LlamaForCausalLM", tied=False), copy.deepcopy(ADAPTER)).to(torch.float64)
    staged, other = (parallelize(model, mesh_for(axes), steps=(Pipeline(),)) for model in (_adapted(0), empty))
    save_adapter(staged, folder / "ours")
    load_adapter(other, folder / "ours")
    load_weights(other, folder / "base")
    assert digest(other) == digest(staged) == digest(reference)
    engine = parallelize(_adapted(2), mesh_for({"tp": 4}))
    shards, target = (ModelShards(model, adapter="default") for model in (staged, engine))
    plan = plan_transfer(shards.layout, target.layout)
    execute_transfer(plan, source=shards.local, destination=target.local)
    assert digest(engine) == digest(reference)


@pytest.mark.parametrize("axes", [{"pp": 2, "tp": 2}, {"pp": 4}], ids=str)
def test_adapters_of_stages_equal_the_file_of_peft(four_ranks: RankPool, tmp_path: Path, axes: dict[str, int]) -> None:
    _model("LlamaForCausalLM").save_pretrained(tmp_path / "base")
    four_ranks.run(_adapters, axes, tmp_path)
    _adapted(0).save_pretrained(tmp_path / "theirs")
    _assert_equal(*(load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")))
