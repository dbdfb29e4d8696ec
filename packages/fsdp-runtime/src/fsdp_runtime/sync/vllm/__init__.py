"""Weights for a running vLLM: its trainer side, and a transfer backend over gloo for machines without NCCL.

Importing this package imports neither vLLM nor the network code; ``fsdp_runtime`` does not import it.

``WeightSource``   a model's weights as vLLM's trainer engines ask for them, releases 0.32 and 0.33
``EngineClient``   vLLM's HTTP server, as far as weights are concerned; needs no vLLM
``EngineSync``     send a model's weights to that server over gloo; needs no vLLM on the trainer's side

The engine's side is the plugin ``fsdp_runtime_gloo`` of vLLM's entry point group ``vllm.general_plugins``: install
``fsdp-runtime`` in the engine's environment, and start it with ``--weight-transfer-config '{"backend": "gloo"}'``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_runtime.sync.vllm.client import EngineClient
    from fsdp_runtime.sync.vllm.report import EngineSyncReport
    from fsdp_runtime.sync.vllm.source import WeightSource
    from fsdp_runtime.sync.vllm.sync import EngineSync

__all__ = ["EngineClient", "EngineSync", "EngineSyncReport", "WeightSource"]

_MODULES = {
    "EngineClient": "client",
    "EngineSync": "sync",
    "EngineSyncReport": "report",
    "WeightSource": "source",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
