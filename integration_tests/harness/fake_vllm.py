"""vLLM's weight-transfer modules in the forms of 0.32 and 0.33, as far as a trainer and a worker meet them."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class _Registry:
    """A factory of vLLM: names, each with a module and a class, loaded at first use."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self._registry:
            raise ValueError(f"{name} is already registered")
        self._registry[name] = (module, class_name)

    def load(self, name: str) -> Any:
        module, class_name = self._registry[name]
        return getattr(importlib.import_module(module), class_name)


@dataclass
class _TrainerInitInfo:
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class _TrainerEngine:
    def __init__(self, *, client: Any, source: Any, is_sender: bool) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


class _WorkerEngine:
    """vLLM's base class: what a worker is made with, and the parsing of what it is sent."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config
        self.device, self.model = device, model

    def parse_init_info(self, info: dict[str, Any]) -> Any:
        return self.init_info_cls(**info)

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return self.update_info_cls(**info)


@dataclass(frozen=True)
class _ParamMeta32:
    name: str
    dtype: Any
    shape: tuple[int, ...]


class _WeightSource32(ABC):
    @abstractmethod
    def metadata(self) -> list[_ParamMeta32]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class _Replicate:
    pass


@dataclass(frozen=True)
class _Shard:
    dim: int


@dataclass(frozen=True)
class _ParamMeta33(_ParamMeta32):
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)


class _WeightSource33(ABC):
    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not isinstance(cls.__dict__.get("metadata", cached_property(id)), cached_property):
            raise TypeError("metadata must be a functools.cached_property")

    @property
    @abstractmethod
    def metadata(self) -> list[_ParamMeta33]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]


def _base(release: str) -> SimpleNamespace:
    old = release == "0.32"
    names: dict[str, Any] = {
        "ParamMeta": _ParamMeta32 if old else _ParamMeta33,
        "WeightSource": _WeightSource32 if old else _WeightSource33,
        "WeightTransferInitInfo": object,
        "WeightTransferUpdateInfo": object,
        "WeightTransferEngine": _WorkerEngine,
        "TrainerInitInfo": _TrainerInitInfo,
        "TrainerWeightTransferEngine": _TrainerEngine,
    }
    return SimpleNamespace(**names, **({} if old else {"Shard": _Shard, "Replicate": _Replicate}))


#: Modules that are defined by what vLLM is at their import.
OURS = ("vllm_gloo.", "fsdp_runtime.sync.vllm_source")


@pytest.fixture(params=["0.32", "0.33"])
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A release of vLLM in ``sys.modules``; our modules are imported anew with it, and forgotten afterwards."""
    base = ModuleType("vllm.distributed.weight_transfer.base")
    base.__dict__.update(vars(_base(request.param)))
    factory = ModuleType("vllm.distributed.weight_transfer.factory")
    factory.__dict__.update(WeightTransferEngineFactory=_Registry(), WeightTransferTrainerFactory=_Registry())
    package = ModuleType("vllm.distributed.weight_transfer")
    package.__dict__.update(base=base, factory=factory)
    fakes = {"vllm": ModuleType("vllm"), "vllm.distributed": ModuleType("vllm.distributed")}
    loader = ModuleType("vllm.model_executor.model_loader.reload")
    loader.__dict__.update(finalize_layerwise_reload=None, initialize_layerwise_reload=None, layerwise=None)
    parallel = ModuleType("vllm.distributed.parallel_state")
    parallel.__dict__.update(get_tensor_model_parallel_rank=lambda: 0)
    fakes["vllm.distributed"].__dict__.update(parallel_state=parallel)
    vocabulary = ModuleType("vllm.model_executor.layers.vocab_parallel_embedding")
    vocabulary.__dict__.update(VocabParallelEmbedding=object)
    folders = ("vllm.model_executor", "vllm.model_executor.model_loader", "vllm.model_executor.layers")
    fakes |= {name: ModuleType(name) for name in folders}
    for module in (package, base, factory, loader, parallel, vocabulary):
        fakes[module.__name__] = module
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(OURS)}
    yield request.param
    for name in [name for name in sys.modules if name.startswith(OURS)]:
        del sys.modules[name]
    sys.modules.update(kept)
