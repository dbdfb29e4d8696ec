"""TRL's ``AsyncGRPOTrainer`` on a mesh with a real vLLM: its worker samples from the server that the trainer updates.

torchrun --standalone --nproc-per-node 2 -m with_vllm.async_grpo --engine-python ENV/bin/python
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor

from fsdp_runtime import MeshSpec, stream_weights
from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sync import WeightTransfer
from fsdp_runtime.trainers import on_mesh
from harness.trainers import COMMON, forget_accelerate
from harness.tree_attention import attend_without_a_kernel
from vllm_gloo import EngineSync
from with_vllm import models
from with_vllm.checksums import checksum
from with_vllm.engine import Engine
from with_vllm.rows import FLOAT32_ROUNDING, ask, bounded, differences

FAMILY = "Qwen3, tied"
STEPS = 3
#: Seconds of an update; every rank has its error within twice as many.
LIMIT_S = 30.0
RUNS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp=2": ({"tp": 2}, {}),
    "dp_shard=2": ({"dp_shard": 2}, {}),
    "dp_shard=2, an adapter": (
        {"dp_shard": 2},
        {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])},
    ),
}


def reward(completions: list[Any], **_: Any) -> list[float]:
    """How many words of a completion are even."""
    texts = (completion[0]["content"] for completion in completions)
    return [sum(int(number) % 2 == 0 for number in re.findall(r"w(\d+)", text)) / 8 for text in texts]


class Checked(WeightTransfer):
    """A transfer that compares the engine with the trainer after every update.

    Args:
        engine: a running server, on rank 0.
        stalls_at: the version in whose update the engine's processes stop.
    """

    def __init__(self, engine: Engine | None, stalls_at: int = 0) -> None:
        url = "http://127.0.0.1:9" if engine is None else engine.client.url
        connect = partial(EngineSync, timeout_s=LIMIT_S / 3) if stalls_at else EngineSync
        super().__init__(url, connect, timeout_s=LIMIT_S if stalls_at else 4 * LIMIT_S, pause="wait")
        self.server, self._stalls_at = engine, stalls_at
        self.problems: list[str] = []
        self.versions: list[str] = []

    def send(self, model: Any, version: int | None = None) -> None:
        if self.server is not None and version == self._stalls_at:
            self._source.iter_full = partial(self._stopping, self._source.iter_full)
        super().send(model, version)
        self.sent = {name: tensor.detach().clone() for name, tensor in stream_weights(model)}

    def _stopping(self, stream: Any) -> Iterator[tuple[str, Tensor]]:
        """The weights, with the engine's processes stopped in the middle."""
        for index, pair in enumerate(stream()):
            if index == 2:
                self.server.stop()  # type: ignore[union-attr]
            yield pair

    def resume(self) -> None:
        super().resume()
        self.versions.append(self.client.weight_version())
        self.problems += [f"version {self.versions[-1]}: {problem}" for problem in self._compare()]

    def _compare(self) -> list[str]:
        expected = {name: checksum(tensor) for name, tensor in self.sent.items()}
        held = self._held()
        problems = [
            f"worker {worker} has other weights than the trainer"
            for worker in range(self.server.tp)  # type: ignore[union-attr]
            if held.get(worker) != expected
        ]
        equal, difference = differences(_plain(self.sent), ask(self.server.client))  # type: ignore[union-attr]
        if not equal or difference > FLOAT32_ROUNDING:
            problems.append(f"its log-probabilities differ from one process's by {difference:.1e}")
        return problems

    def _held(self) -> dict[int, dict[str, str]]:
        """Checksums by worker.  After a call that a worker did not answer, vLLM gives its answer to a later call."""
        question, found = f"{time.time_ns()}", {}
        for _ in range(8):
            for worker, answer in enumerate(self.server.ask("held", question)):  # type: ignore[union-attr]
                if isinstance(answer, list) and answer[0] == question:
                    found[worker] = answer[1]
            if len(found) == self.server.tp:  # type: ignore[union-attr]
                break
        return found


def _plain(weights: dict[str, Tensor]) -> Any:
    """The model of one process with these weights."""
    model = models.build(FAMILY)
    missing = model.load_state_dict(weights, strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"other weights were sent than the model has: {missing}")
    return model


def _trainer(checkpoint: Path, output: Path, axes: dict[str, int], transfer: Checked, url: str, **given: Any) -> Any:
    """TRL's trainer on a mesh, with TRL's own rollout worker and client of the server."""
    forget_accelerate()
    attend_without_a_kernel()
    trl = importlib.import_module("trl.experimental.async_grpo")
    worker = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
    worker.__dict__["is_vllm_available"] = lambda: True  # it asks for vLLM's package, and uses none of it
    options = {
        **COMMON,
        "learning_rate": 2e-2,
        "output_dir": str(output),
        "per_device_train_batch_size": 4 // axes.get("dp_shard", 1),
        "num_generations": 2,
        "max_steps": STEPS,
        "max_completion_length": 8,
        "gradient_checkpointing": False,
        "vllm_server_base_url": url,
    }
    prompts = [[{"role": "user", "content": f"w{5 + index} w{40 + index}"}] for index in range(8)]
    return on_mesh(trl.AsyncGRPOTrainer)(
        model=str(checkpoint),
        mesh=MeshSpec(**axes).build(device_type="cpu"),
        args=trl.AsyncGRPOConfig(**options),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        weight_transfer=transfer,
        **given,
    )


class Session:
    """Runs of trainers with one engine; every rank has one, and rank 0 the engine."""

    def __init__(self, engine: Engine | None, checkpoint: Path, output: Path) -> None:
        self._engine, self._checkpoint, self._output = engine, checkpoint, output
        said = [None if engine is None else engine.client.url]
        dist.broadcast_object_list(said, src=0)
        self._url = str(said[0])
        self.problems: list[str] = []

    def run(self, only: str) -> None:
        """Every run whose name a regular expression finds, and one in which the engine stops."""
        for name, (axes, given) in RUNS.items():
            if re.search(only, name):
                self._train(name, axes, given)
        if re.search(only, "stops"):
            self._stall()
            self._train("after it went on", {"tp": 2}, {})

    def _train(self, name: str, axes: dict[str, int], given: dict[str, Any]) -> None:
        transfer, start = Checked(self._engine), time.monotonic()
        trainer = _trainer(self._checkpoint, self._output, axes, transfer, self._url, **given)
        message, _ = bounded(trainer.train)
        expected = [str(version) for version in range(1, STEPS + 2)]
        if message is not None:
            transfer.problems.append(message)
        elif self._engine is not None and transfer.versions != expected:
            transfer.problems.append(f"versions {transfer.versions}, not {expected}")
        ratios = [entry["ratio"] for entry in trainer.state.log_history if "ratio" in entry]
        if not ratios or abs(ratios[0] - 1) > 10 * FLOAT32_ROUNDING:  # later steps train on samples of earlier versions
            transfer.problems.append(f"the sampled tokens' log-probabilities are not the trainer's: ratios {ratios}")
        self._say(name, transfer.problems, f"{time.monotonic() - start:.0f} s, versions {transfer.versions}")

    def _stall(self) -> None:
        transfer = Checked(self._engine, stalls_at=2)
        trainer = _trainer(self._checkpoint, self._output, {"dp_shard": 2}, transfer, self._url)
        message, seconds = bounded(trainer.train)
        if self._engine is not None:
            self._engine.go_on()
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, (message, seconds))
        problems = [] if len({text for text, _ in said}) == 1 else [f"ranks disagree: {said}"]
        if message is None or WeightSyncError.__name__ not in message:
            problems.append(f"no error of the transfer: {message}")
        self._say("the engine stops in an update", problems, f"{seconds:.0f} s: {message}")

    def _say(self, name: str, problems: list[str], figures: str) -> None:
        self.problems += problems
        if dist.get_rank() == 0:
            sys.stdout.write(f"{name}: {'; '.join(problems) or 'as it should be'} ({figures})\n")
            sys.stdout.flush()


def main() -> int:
    """Run the session; 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(prog="with_vllm.async_grpo", description=__doc__.partition("\n")[0])
    parser.add_argument("--engine-python", required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--only", default="", help="a regular expression for the runs' names, or 'stops'")
    parser.add_argument("--server-logs", type=Path, help="folder for the server's log; else a temporary one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(prefix="async-grpo-") as temporary:
        shared = [temporary]
        dist.broadcast_object_list(shared, src=0)
        folder = Path(shared[0])
        checkpoint, engine = folder / "checkpoint", None
        if dist.get_rank() == 0:
            models.write(FAMILY, checkpoint, weights=True)
            named = ("--served-model-name", "policy", str(checkpoint))
            extension = ("--worker-extension-cls", "with_vllm.worker_extension.Questions")
            log = (options.server_logs or folder) / "async-grpo.log"
            engine = Engine(options.engine_python, checkpoint, 2, log, *named, *extension).start()
        try:
            if engine is not None:
                engine.wait()
            dist.barrier()
            session = Session(engine, checkpoint, folder / "output")
            session.run(options.only)
        finally:
            if engine is not None:
                engine.kill()
        dist.barrier()
    dist.destroy_process_group()
    return int(bool(session.problems))


if __name__ == "__main__":
    sys.exit(main())
