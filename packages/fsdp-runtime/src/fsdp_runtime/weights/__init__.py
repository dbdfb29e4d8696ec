"""Weights of sharded models: load and save Hugging Face checkpoints, stream full tensors."""

from __future__ import annotations

from fsdp_runtime.model.buffers import meta_device
from fsdp_runtime.model.materialize import materialize
from fsdp_runtime.weights.adapters import adapter_tensors as adapter_tensors
from fsdp_runtime.weights.adapters import saved_tensors as saved_tensors
from fsdp_runtime.weights.export import ExportedTensor as ExportedTensor
from fsdp_runtime.weights.export import ExportGroup as ExportGroup
from fsdp_runtime.weights.export import MergedShards as MergedShards
from fsdp_runtime.weights.load import LoadReport, load_weights
from fsdp_runtime.weights.load_adapter import init_adapters, load_adapter
from fsdp_runtime.weights.multi_token_heads import multi_token_weights
from fsdp_runtime.weights.quantize.dequantized import DequantizedTensor as DequantizedTensor
from fsdp_runtime.weights.quantize.formats import Quantization as Quantization
from fsdp_runtime.weights.quantize.formats import QuantizationFormat as QuantizationFormat
from fsdp_runtime.weights.save import save_weights
from fsdp_runtime.weights.stream import DEFAULT_BUCKET_BYTES as DEFAULT_BUCKET_BYTES
from fsdp_runtime.weights.stream import Bucket as Bucket
from fsdp_runtime.weights.stream import HeldTensors as HeldTensors
from fsdp_runtime.weights.stream import WeightExport as WeightExport
from fsdp_runtime.weights.stream import stream_weights

__all__ = [
    "LoadReport",
    "init_adapters",
    "load_adapter",
    "load_weights",
    "materialize",
    "meta_device",
    "multi_token_weights",
    "save_weights",
    "stream_weights",
]
