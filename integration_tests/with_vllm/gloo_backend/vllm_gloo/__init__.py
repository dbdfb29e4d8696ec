"""Test bench: a transfer backend of vLLM over gloo, for machines without NCCL.

Importing this package imports neither vLLM nor the network code.

``EngineClient``   vLLM's HTTP server, as far as weights are concerned: that of ``fsdp_runtime.sync``
``EngineSync``     send a model's weights to that server over gloo; needs no vLLM on the trainer's side

The engine's side is the plugin ``vllm_gloo`` of vLLM's entry point group ``vllm.general_plugins``: install this
folder in the engine's environment, and start it with ``--weight-transfer-config '{"backend": "gloo"}'``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_runtime.sync.engine_client import EngineClient
    from vllm_gloo.report import EngineSyncReport
    from vllm_gloo.sync import EngineSync

__all__ = ["EngineClient", "EngineSync", "EngineSyncReport"]

_MODULES = {
    "EngineClient": "fsdp_runtime.sync.engine_client",
    "EngineSync": f"{__name__}.sync",
    "EngineSyncReport": f"{__name__}.report",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
