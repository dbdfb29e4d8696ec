"""Weights in and out: meta device to real, safetensors to shards, shards to full tensors, shards to safetensors."""

from __future__ import annotations

from fsdp_runtime.model.buffers import meta_device
from fsdp_runtime.model.materialize import materialize
from fsdp_runtime.weights.load import LoadReport, load_weights
from fsdp_runtime.weights.load_adapter import init_adapters, load_adapter
from fsdp_runtime.weights.save import save_weights
from fsdp_runtime.weights.send import WeightInfo, describe_weights, packed, send_weights, stream_buckets, unpacked
from fsdp_runtime.weights.stream import stream_weights

__all__ = [
    "LoadReport",
    "WeightInfo",
    "describe_weights",
    "init_adapters",
    "load_adapter",
    "load_weights",
    "materialize",
    "meta_device",
    "packed",
    "save_weights",
    "send_weights",
    "stream_buckets",
    "stream_weights",
    "unpacked",
]
