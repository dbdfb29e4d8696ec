"""``AsyncGRPOTrainer`` on a mesh against that of one process, with rollouts of a stand-in; by ``nox -s trainers``."""

from __future__ import annotations

import importlib
import queue
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peft
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor

from fsdp_runtime import FsdpRuntimeError, OptionError, stream_weights
from fsdp_runtime.sync import WeightTransfer
from fsdp_runtime.trainers import on_mesh
from harness.engine_server import EngineServer, Transport, first
from harness.models import VOCAB
from harness.parity import mesh_for
from harness.ranks import RankPool
from harness.trainers import (
    BATCH,
    COMMON,
    Outcome,
    adapted_as_on_a_mesh,
    differences,
    dp_size,
    forget_accelerate,
    tokenizer,
    write_checkpoint,
)
from harness.tree_attention import attend_without_a_kernel

#: Not the reward: in one process accelerate reads a batch ahead, and TRL logs the rewards of what was read.
FIGURES = ("loss", "grad_norm", "entropy", "ratio", "kl", "clip_ratio/region_mean")
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mixture"), architecture="Qwen3MoeForCausalLM")


class Rollouts:
    """Samples that depend on nothing but their number; two of a prompt share it.

    Args:
        count: samples before the worker's health is asked for.
    """

    def __init__(self, count: int = BATCH * 8) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.versions: list[int] = []
        self.running = False
        generator = torch.Generator().manual_seed(0)
        worker = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
        for index in range(count):
            if index % 2 == 0:
                prompt = torch.randint(4, VOCAB, (2 + index % 3,), generator=generator).tolist()
            completion = torch.randint(4, VOCAB, (3 + index % 4,), generator=generator).tolist()
            trained = [0] * len(prompt) + [1] * len(completion)
            self.rollout_buffer.put(
                worker.RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array(prompt + completion),
                    completion_mask=np.array(trained),
                    old_log_probs=np.array([-4.8 * each for each in trained], dtype=np.float32),
                    advantage=1.0 if index % 2 else -0.7,
                    model_version=10**6,  # never stale
                    group_id=index // 2,
                    metrics={"reward": index / 10},
                )
            )

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the rollout worker died")


class Recorder:
    """TRL's protocol, called on rank 0 alone."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: list[dict[str, Tensor]] = []

    def init_weight_transfer(self) -> None:
        self.calls.append("init")

    def pause(self) -> None:
        self.calls.append("pause")

    def send_weights(self, iterator: Any) -> None:
        self.weights.append({name: tensor.detach().clone() for name, tensor in iterator})
        self.calls.append("send")

    def resume(self) -> None:
        self.calls.append("resume")

    def destroy(self) -> None:
        self.calls.append("destroy")


def build(folder: Path, axes: dict[str, int] | None, *, output: Path, **given: Any) -> Any:
    """A trainer of three steps, on a mesh or, without axes, TRL's own."""
    forget_accelerate()
    trl = importlib.import_module("trl.experimental.async_grpo")
    attend_without_a_kernel()
    module: Any = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    client = given.pop("client", None)  # of TRL wants requests; ``None`` where it is not asked anything
    module.VLLMClient = lambda url, timeout: client
    if axes is None:
        module.get_peak_flops_per_device = lambda accelerator, dtype: None  # TRL's asks CUDA for its name
    options = {
        **COMMON,
        "output_dir": str(output),
        "per_device_train_batch_size": BATCH // dp_size(axes),
        "num_generations": 2,
        "max_steps": STEPS,
        "token_budget": 0,
        "gradient_checkpointing": False,
        "temperature": 0.9,
        **{name: given.pop(name) for name in [*given] if name in trl.AsyncGRPOConfig.__dataclass_fields__},
    }
    common: dict[str, Any] = {
        "model": str(folder),
        "args": trl.AsyncGRPOConfig(**options),
        "train_dataset": Dataset.from_list([{"prompt": f"t{5 + index}"} for index in range(3)]),
        "processing_class": tokenizer(),
        "rollout_worker": Rollouts(),
        "weight_transfer": Recorder(),
        **given,
    }
    if axes is None:
        return trl.AsyncGRPOTrainer(**common)
    return on_mesh(trl.AsyncGRPOTrainer)(**common, mesh=mesh_for(axes))


def _run(folder: Path, output: Path, axes: dict[str, int] | None, **given: Any) -> tuple[Outcome, Any, int]:
    trainer = build(folder, axes, output=output, **given)
    trainer.train()
    weights = {name: tensor.detach().clone() for name, tensor in stream_weights(trainer.model)}
    transfer = trainer.weight_transfer
    sent = None if transfer is None else (transfer.calls, transfer.weights)
    return Outcome(trainer.state.log_history, weights, ""), sent, trainer.state.global_step


MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2})


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_figures_and_weights_are_those_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, folder: Path, tmp_path: Path, axes: dict[str, int]
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    (found, sent, _), *others = pool.run(_run, folder, tmp_path / "mesh", axes, timeout=400)
    expected, (calls, weights), _ = _run(folder, tmp_path / "alone", None)
    assert differences(found, expected, FIGURES) == {}
    assert found.logged("reward") == pytest.approx([0.15, 0.55, 0.95])  # of the batches that each step trains on
    assert all(differences(other, found, ("loss", "grad_norm")) == {} for other, _, _ in others)
    assert sent[0] == calls
    for ours, theirs in zip(sent[1], weights, strict=True):
        assert ours.keys() == theirs.keys() - {"lm_head.weight"} or ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], atol=2e-5) for name in ours)


def test_they_are_with_experts_divided_over_ranks(two_ranks: RankPool, mixture: Path, tmp_path: Path) -> None:
    given = {"router_aux_loss_coef": 0.0}
    found = two_ranks.run(_run, mixture, tmp_path / "mesh", {"tp": 2, "ep": 2}, timeout=400, **given)[0][0]
    assert differences(found, _run(mixture, tmp_path / "alone", None, **given)[0], FIGURES) == {}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("method", ["allgather", "ulysses", "ring"])
def test_trees_of_sliding_windows_are_divided_over_ranks_by_every_method(
    four_ranks: RankPool, tmp_path: Path, architecture: str, method: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", architecture=architecture)
    given = {"gradient_checkpointing": True}
    options = {"parallelize_kwargs": {"context_parallel": method}}
    axes = {"cp": 2, "tp": 2}
    found = four_ranks.run(_run, folder, tmp_path / "mesh", axes, timeout=400, **given, **options)[0][0]
    assert differences(found, _run(folder, tmp_path / "alone", None, **given)[0], FIGURES) == {}


def _lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **options)


@pytest.mark.parametrize("axes", MESHES[1:], ids=str)
def test_an_adapter_is_sent_merged(
    two_ranks: RankPool,
    four_ranks: RankPool,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    axes: dict[str, int],
) -> None:
    pool, given = four_ranks if len(axes) > 1 else two_ranks, {"peft_config": _lora(), "learning_rate": 0.1}
    found, (calls, weights), _ = pool.run(_run, folder, tmp_path / "mesh", axes, timeout=400, **given)[0]
    module = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    monkeypatch.setattr(module, "get_peft_model", adapted_as_on_a_mesh)
    expected, (_, merged), _ = _run(folder, tmp_path / "alone", None, **given)
    assert differences(found, expected, FIGURES) == {}
    assert calls == ["init", *["pause", "send", "resume"] * (STEPS + 1), "destroy"]
    changed = set()
    for ours, theirs in zip(weights, merged, strict=True):
        assert not any("lora" in name for name in ours)
        assert all(torch.allclose(ours[name], theirs[name], atol=2e-5) for name in ours)
        changed |= {name.split(".")[-2] for name in ours if not torch.equal(ours[name], weights[0][name])}
    assert changed == {"q_proj", "down_proj"}


class LoraClient:
    """TRL's client of a server with adapters, which reads each as it is loaded."""

    def __init__(self, **lora_config: int) -> None:
        self.lora_config = {"max_lora_rank": 8, "max_loras": 6, **lora_config}
        self.calls: list[str] = []
        self.adapters: dict[str, dict[str, Tensor]] = {}

    def get_server_info(self) -> dict[str, Any]:
        return {"lora_config": self.lora_config, "parallel_config": {"data_parallel_size": 1}}

    def load_lora_adapter(self, name: str, path: str) -> None:
        assert (Path(path) / "adapter_config.json").exists()
        self.adapters[name] = load_file(Path(path) / "adapter_model.safetensors")
        self.calls.append(f"load {name}")

    def unload_lora_adapter(self, name: str) -> None:
        self.calls.append(f"unload {name}")

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def wait_for_server_ready(self) -> None:
        self.calls.append("ready")


def _published(folder: Path, output: Path, axes: dict[str, int] | None, **given: Any) -> Any:
    client = LoraClient()
    lora = _lora(**given.pop("lora", {}))
    options = {"weight_transfer": None, "peft_config": lora, "learning_rate": 0.1, "max_staleness": 1, "client": client}
    trainer = build(folder, axes, output=output, **options, **given)
    is_alone = bool(trainer._lora_sync)
    if is_alone:
        trainer.train()
    return is_alone, client.calls, client.adapters, trainer.rollout_worker and trainer.rollout_worker.versions


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_an_adapter_is_published_alone_where_the_server_takes_it(
    two_ranks: RankPool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axes: dict[str, int]
) -> None:
    (alone, calls, adapters, versions), other = two_ranks.run(_published, folder, tmp_path / "mesh", axes, timeout=400)
    module = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    monkeypatch.setattr(module, "get_peft_model", adapted_as_on_a_mesh)
    expected = _published(folder, tmp_path / "alone", None)
    assert (alone, calls, versions) == (True, expected[1], [1, 2, 3, 4])
    assert other == (True, [], {}, None)  # the other rank talks to no server
    assert calls[-3:] == ["load trl-policy-v4", "resume", "unload trl-policy-v2"]
    assert adapters.keys() == expected[2].keys() == {f"trl-policy-v{version}" for version in (1, 2, 3, 4)}
    for name, tensors in adapters.items():
        assert tensors.keys() == expected[2][name].keys()
        assert all(torch.allclose(tensors[key], expected[2][name][key], atol=2e-5) for key in tensors)
    assert not all(torch.equal(adapters["trl-policy-v1"][key], adapters["trl-policy-v4"][key]) for key in tensors)
    left = {path.name for path in (tmp_path / "mesh" / ".vllm_lora").iterdir()}
    assert left == {path.name for path in (tmp_path / "alone" / ".vllm_lora").iterdir()}


def _manifest(folder: Path, output: Path, axes: dict[str, int], adapter: dict[str, Any]) -> tuple[bool, Any]:
    """What TRL's client of vLLM is told of the weights, for an adapter that vLLM would scale otherwise."""
    module: Any = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    told: list[Any] = []
    with mock.patch.object(module, "WeightTransferClient", lambda **given: told.append(given["weight_update_info"])):
        alone = _published(folder, output, axes, lora=adapter)[0]
    return alone, told


def test_an_adapter_that_vllm_scales_otherwise_is_sent_merged(
    two_ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    (alone, told), other = two_ranks.run(_manifest, folder, tmp_path, {"tp": 2}, {"alpha_pattern": {"q_proj": 3}})
    assert (alone, other) == (False, (False, []))
    stored = load_file(folder / "model.safetensors")
    assert set(told[0]["names"]) == stored.keys()
    assert [stored[name].shape for name in told[0]["names"]] == [torch.Size(shape) for shape in told[0]["shapes"]]
    assert set(told[0]["dtype_names"]) == {"float32"}


def test_all_ranks_end_with_the_epoch(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    steps = [step for *_, step in two_ranks.run(_run, folder, tmp_path, {"tp": 2}, max_steps=-1, num_train_epochs=2)]
    assert steps == [3, 3]  # six groups, two a step


def _resumed(folder: Path, output: Path, axes: dict[str, int]) -> float | None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    whole = build(folder, axes, output=output, **saving)
    whole.train()
    again = build(folder, axes, output=output, **saving)
    again.train(resume_from_checkpoint=str(output / "checkpoint-1"))
    if not first():
        return None
    saved, sent = whole.weight_transfer.weights[1], again.weight_transfer.weights[0]
    return max((saved[name] - sent[name]).abs().max().item() for name in saved)


def test_a_resumed_trainer_sends_its_weights_first(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    assert two_ranks.run(_resumed, folder, tmp_path, {"dp_shard": 2}, timeout=200)[0] == 0


def _synced(folder: Path, output: Path, axes: dict[str, int], faults: dict[str, str], samples: int) -> tuple[str, Any]:
    """Train with a ``WeightTransfer`` to a server; what was raised, and what the server has."""
    with EngineServer(**faults) if first() else nullcontext() as server:
        transfer = WeightTransfer(
            "http://127.0.0.1:9" if server is None else server.url,
            lambda source, client: Transport(source, client, server),
            timeout_s=8,
        )
        try:
            trainer = build(folder, axes, output=output, weight_transfer=transfer, rollout_worker=Rollouts(samples))
            trainer.train()
        except (FsdpRuntimeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}", None
        last = {name: tensor.detach().clone() for name, tensor in stream_weights(trainer.model)}
        if server is None:
            return "", None
        equal = all(torch.equal(server.weights[name], last[name]) for name in last)
        return "", (server.version, len(server.updates), equal, server.paused, trainer.rollout_worker.versions)


def test_a_server_has_the_weights_and_version_of_each_step(four_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    found = four_ranks.run(_synced, folder, tmp_path, {"dp_shard": 2, "tp": 2}, {}, BATCH * 8, timeout=400)
    assert [said for said, _ in found] == [""] * 4
    assert found[0][1] == (str(STEPS + 1), STEPS + 1, True, False, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("faults", "samples", "words"),
    [
        ({"weight_info": "dies"}, BATCH * 8, "VLLM_SERVER_DEV_MODE=1"),
        ({"pause": "silent"}, BATCH * 8, "/pause?mode=keep gave no answer"),
        ({"update_weights": "500"}, BATCH * 8, "update_weights failed in the engine"),
        ({"finish_weight_update": "ignored"}, BATCH * 8, "names version 'default'"),
        ({"resume": "ignored"}, BATCH * 8, "still paused"),
        ({}, BATCH, "the rollout worker died"),
    ],
    ids=lambda value: str(value),
)
def test_what_fails_on_rank_0_is_raised_on_every_rank(
    two_ranks: RankPool, folder: Path, tmp_path: Path, faults: dict[str, str], samples: int, words: str
) -> None:
    for said, _ in two_ranks.run(_synced, folder, tmp_path, {"dp_shard": 2}, faults, samples, timeout=200):
        assert words in said
        assert said.startswith(("WeightSyncError", "OtherRankError", "RuntimeError"))


def _refused(folder: Path, output: Path) -> list[str]:
    said = []
    cases: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"tp": 2}, {"peft_config": _lora(use_dora=True)}),
        ({"tp": 2}, {"parallelize_kwargs": {"packed_sequences": True}}),
        ({"tp": 2}, {"model": torch.nn.Linear(2, 2)}),
    ]
    for axes, given in cases:
        try:
            build(folder, axes, output=output, **given)
        except OptionError as error:
            said.append(str(error))
        else:
            said.append("accepted")
    return said


def test_what_cannot_be_right_is_refused_with_the_fix(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for adapter, packed, module in two_ranks.run(_refused, folder, tmp_path):
        assert "leave it out of target_modules" in adapter
        assert "leave it out" in packed
        assert "pass its path" in module
