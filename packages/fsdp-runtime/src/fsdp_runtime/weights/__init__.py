"""Weights of sharded models: load and save Hugging Face checkpoints, stream full tensors."""

from __future__ import annotations

from fsdp_runtime.model.buffers import meta_device
from fsdp_runtime.model.materialize import materialize
from fsdp_runtime.weights.load import LoadReport, load_weights
from fsdp_runtime.weights.load_adapter import init_adapters, load_adapter
from fsdp_runtime.weights.save import save_weights
from fsdp_runtime.weights.stream import stream_weights

__all__ = [
    "LoadReport",
    "init_adapters",
    "load_adapter",
    "load_weights",
    "materialize",
    "meta_device",
    "save_weights",
    "stream_weights",
]
