"""Load, save and stream the weights of sharded models.  Other rooms import names beyond ``__all__`` from here."""

from __future__ import annotations

from fsdp_runtime.model.buffers import meta_device
from fsdp_runtime.model.materialize import materialize
from fsdp_runtime.weights.adapters import adapter_tensors, require_adapter, saved_tensors
from fsdp_runtime.weights.export import ExportedTensor, ExportGroup, MergedShards
from fsdp_runtime.weights.load import LoadReport, load_weights
from fsdp_runtime.weights.load_adapter import init_adapters, load_adapter
from fsdp_runtime.weights.multi_token_heads import multi_token_weights
from fsdp_runtime.weights.quantize.formats import Quantization, QuantizationFormat
from fsdp_runtime.weights.quantize.packed import DequantizedTensor
from fsdp_runtime.weights.save import save_weights
from fsdp_runtime.weights.stream import DEFAULT_BUCKET_BYTES, Bucket, HeldTensors, WeightExport, stream_weights

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
