"""Updates of an engine over gloo: the order of messages, and an engine that has its old weights after any failure.

Trainer and workers are those of the package, in threads of one process; vLLM's classes, routes and loader are fakes.
"""

from __future__ import annotations

import doctest
import importlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_runtime import OptionError
from fsdp_runtime.sync import WeightExport, WeightSource, WeightSyncError, WeightTransfer
from harness.models import tiny_model
from harness.ranks import RankPool

OURS = "vllm_gloo"


class Engine:
    """A server with two workers, as its client sees it; ``calls`` lists the routes in order."""

    def __init__(self, worker_class: Any, workers: int = 2) -> None:
        self.calls: list[str] = []
        self.named, self.active, self.paused = "default", False, False
        self.models = [SimpleNamespace(weights={}, loads=0, fails=False) for _ in range(workers)]
        self.workers = []
        for rank, model in enumerate(self.models):
            parallel = SimpleNamespace(
                data_parallel_index=0, world_size=workers, rank=rank, tensor_parallel_size=workers
            )
            config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(quantization=None))
            self.workers.append(worker_class(None, config, torch.device("cpu"), model))

    def _all(self, call: Callable[[Any], None]) -> None:
        with ThreadPoolExecutor(len(self.workers)) as pool:
            futures = [pool.submit(call, worker) for worker in self.workers]
        for future in futures:
            try:
                future.result()
            except Exception as error:
                self.active = False
                raise WeightSyncError(f"500: {error}") from error

    def world_size(self) -> int:
        return len(self.workers)

    def weight_version(self, *, timeout_s: float | None = None) -> str:
        return self.named

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.calls.append("init")
        self._all(lambda worker: worker.init_transfer_engine(worker.parse_init_info(info)))

    def start_weight_update(self) -> None:
        self.calls.append("start")
        if self.active:
            raise WeightSyncError("500: start_weight_update called while a weight update is already active")
        self._all(lambda worker: worker.start_weight_update())
        self.active = True

    def update_weights(self, info: dict[str, Any]) -> None:
        self.calls.append(info["action"])
        self._all(lambda worker: worker.update_weights(info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish" if weight_version is None else f"finish {weight_version}")
        if not self.active:
            raise WeightSyncError("500: finish_weight_update called without a matching start_weight_update")
        self.active, self.named = False, weight_version or self.named

    def pause(self, mode: str) -> None:
        self.calls.append("pause")
        self.paused = True

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    def is_paused(self) -> bool:
        return self.paused


def load_into(model: Any, config: Any, weights: list[tuple[str, Tensor]]) -> None:
    """In the place of vLLM's loader: a failing one leaves half of the weights."""
    model.loads += 1
    for index, (name, tensor) in enumerate(weights):
        if model.fails and index > len(weights) // 2:
            model.fails = False
            raise RuntimeError(f"{name} does not fit")
        model.weights[name] = tensor.clone()


def try_on_meta(model: Any, config: Any, weights: list[Any], tp: int) -> None:
    for weight in weights:
        if weight.name in model.weights and model.weights[weight.name].shape != weight.shape:
            raise WeightSyncError(f"{weight.name} of shape {weight.shape} does not fit the engine's model")


@pytest.fixture
def ours(release: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package's modules, with a fake of vLLM's loader."""
    loader = ModuleType(f"{OURS}.reload")
    loader.__dict__.update(load_into=load_into, try_on_meta=try_on_meta)
    monkeypatch.setitem(sys.modules, loader.__name__, loader)
    modules = {name: importlib.import_module(f"{OURS}.{name}") for name in ("sync", "worker", "plugin")}
    modules["source"] = importlib.import_module("fsdp_runtime.sync.vllm_source")
    return SimpleNamespace(**modules, worker_class=modules["worker"].GlooWeightTransferEngine)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("Qwen3ForCausalLM", dtype=torch.float32, tied=True)


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def held(engine: Engine, model: nn.Module, ours: Any) -> bool:
    """Whether every worker has the model's present weights, bit for bit."""
    full = dict(ours.source.WeightSource(model).iter_full())
    return all(
        each.weights.keys() == full.keys() and all(torch.equal(each.weights[name], full[name]) for name in full)
        for each in engine.models
    )


PARTS = ["start", "check", "receive", "pause", "apply"]


def test_an_update_is_announced_received_and_applied_in_this_order(ours: Any, model: nn.Module) -> None:
    for bucket_bytes in (1, 2**20):
        engine = Engine(ours.worker_class)
        sync = ours.sync.EngineSync(ours.source.WeightSource(model), engine, bucket_bytes=bucket_bytes, timeout_s=20)
        report = sync.update("a")
        assert engine.calls == ["init", *PARTS, "finish a", "resume"]
        assert held(engine, model, ours)
        assert (report.version, engine.named) == ("a", "a")
        assert report.nbytes == sum(tensor.nbytes for tensor in engine.models[0].weights.values())
        change(model)
        engine.calls.clear()
        assert sync.update("b").connect_s < 1
        assert engine.calls == [*PARTS, "finish b", "resume"]  # the group of before
        assert held(engine, model, ours)


def test_what_the_engine_refuses_is_not_sent(ours: Any, model: nn.Module) -> None:
    engine = Engine(ours.worker_class)
    ours.sync.EngineSync(ours.source.WeightSource(model), engine, timeout_s=20).update("a")
    engine.calls.clear()
    fp8 = ours.source.WeightSource(model, export=WeightExport(dtype=torch.float8_e4m3fn))
    with pytest.raises(WeightSyncError, match=r"version 'b' \(it has version 'a'\).* float8_e4m3fn.*not quantized"):
        ours.sync.EngineSync(fp8, engine, timeout_s=20).update("b")
    other = ours.source.WeightSource(tiny_model("Qwen3ForCausalLM", dtype=torch.float32, tied=True, vocab_size=99))
    with pytest.raises(WeightSyncError, match=r"embed_tokens.weight of shape \(99, 64\) does not fit"):
        ours.sync.EngineSync(other, engine, timeout_s=20).update("b")
    assert "receive" not in engine.calls
    assert held(engine, model, ours)


def test_a_trainer_that_fails_in_the_middle_leaves_the_old_weights(ours: Any, model: nn.Module) -> None:
    class Breaks(ours.source.WeightSource):  # type: ignore[misc]
        breaks = False

        def iter_full(self) -> Iterator[tuple[str, Tensor]]:
            for index, pair in enumerate(super().iter_full()):
                if self.breaks and index == 3:
                    raise RuntimeError("no memory")
                yield pair

    engine = Engine(ours.worker_class)
    source = Breaks(model)
    sync = ours.sync.EngineSync(source, engine, bucket_bytes=1, timeout_s=5)
    sync.update("a")
    assert held(engine, model, ours)
    change(model)
    source.breaks = True
    with pytest.raises(WeightSyncError, match=r"it has version 'a'.*no memory"):
        sync.update("b")
    assert not held(engine, model, ours)
    assert [each.loads for each in engine.models] == [1, 1]
    source.breaks = False
    sync.update("c")
    assert held(engine, model, ours)


def test_workers_go_back_together_when_one_cannot_load(ours: Any, model: nn.Module) -> None:
    engine = Engine(ours.worker_class)
    sync = ours.sync.EngineSync(ours.source.WeightSource(model), engine, timeout_s=20)
    sync.update("a")
    before = {name: tensor.clone() for name, tensor in engine.models[0].weights.items()}
    change(model)
    engine.models[1].fails = True
    with pytest.raises(WeightSyncError, match=r"it has version 'a'.*does not fit"):
        sync.update("b")
    for each in engine.models:
        assert all(torch.equal(each.weights[name], before[name]) for name in before)
    assert engine.calls[-1] != "pause"
    assert engine.calls.count("pause") == engine.calls.count("resume")
    sync.update("c")
    assert held(engine, model, ours)


def test_another_engine_at_the_same_address_is_noticed(ours: Any, model: nn.Module) -> None:
    engine = Engine(ours.worker_class)
    sync = ours.sync.EngineSync(ours.source.WeightSource(model), engine, timeout_s=20)
    sync.update("a")
    for workers in (2, 1):
        restarted = Engine(ours.worker_class, workers)
        engine.__dict__.update(restarted.__dict__)
        sync.update("b")
        assert held(engine, model, ours)


def test_an_update_that_another_trainer_left_open_is_closed(ours: Any, model: nn.Module) -> None:
    engine = Engine(ours.worker_class)
    engine.start_weight_update()
    ours.sync.EngineSync(ours.source.WeightSource(model), engine, timeout_s=20).update("a")
    assert held(engine, model, ours)


def test_a_weight_transfer_connects_by_it_as_it_is(ours: Any, model: nn.Module) -> None:
    engine = Engine(ours.worker_class)
    transfer = WeightTransfer(engine, ours.sync.EngineSync, timeout_s=20)
    for version in (1, 2):
        engine.calls.clear()
        transfer.pause()
        transfer.send(model, version)
        assert (engine.named, engine.paused) == (str(version), True)
        transfer.resume()
        assert engine.calls[-2:] == [f"finish {version}", "resume"]
        assert engine.calls.count("pause") == 1  # the transfer's, which it ends
        assert held(engine, model, ours)
        change(model)
    transfer.destroy()


def test_a_trainer_that_calls_one_rank_alone_connects_by_it_too(ours: Any, model: nn.Module) -> None:
    engine = Engine(ours.worker_class)
    transfer = WeightTransfer(engine, ours.sync.EngineSync, timeout_s=20)
    for version in ("0", "1"):
        transfer.send_weights(ours.source.WeightSource(model).iter_full())
        assert (engine.named, engine.paused) == (version, False)
        assert held(engine, model, ours)
        change(model)
    transfer.destroy()


def _built() -> bool:
    from vllm_gloo import EngineSync

    made = EngineSync(WeightSource(nn.Linear(2, 3)), object())
    return made._client is None


def test_other_ranks_do_not_use_the_client(two_ranks: RankPool) -> None:
    assert two_ranks.run(_built) == [False, True]


def test_rank_0_has_a_client(ours: Any, model: nn.Module) -> None:
    with pytest.raises(OptionError, match="client"):
        ours.sync.EngineSync(ours.source.WeightSource(model), None)


def test_the_plugin_registers_both_sides_once_and_loads_them_on_demand(ours: Any, model: nn.Module) -> None:
    ours.plugin.register()
    ours.plugin.register()
    factory = sys.modules["vllm.distributed.weight_transfer.factory"]
    assert factory.WeightTransferEngineFactory.load("gloo") is ours.worker_class
    trainer = factory.WeightTransferTrainerFactory.load("gloo")
    engine = Engine(ours.worker_class)
    info = trainer.init_info_cls(world_size=2, timeout_s=20, rank=0)
    assert info.backend == "gloo"
    sender = trainer.trainer_init(info, client=engine, source=ours.source.WeightSource(model))
    assert [sender.send_weights().version for _ in range(2)] == ["1", "2"]
    assert held(engine, model, ours)


def test_the_entry_point_names_the_plugin(ours: Any) -> None:
    import tomllib
    from pathlib import Path

    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    (target,) = settings["project"]["entry-points"]["vllm.general_plugins"].values()
    module, _, function = target.partition(":")
    assert getattr(importlib.import_module(module), function) is ours.plugin.register


def test_the_example_prints_what_it_says() -> None:
    found = importlib.import_module(f"{OURS}.sync")
    (example,) = doctest.DocTestFinder(recurse=False).find(found.EngineSync, module=found)
    results = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL).run(example)
    assert (results.failed, results.attempted > 0) == (0, True)
