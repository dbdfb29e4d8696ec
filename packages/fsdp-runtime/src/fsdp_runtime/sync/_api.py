"""Public names of ``fsdp_runtime.sync``, which imports this module at the first use of a name."""

from __future__ import annotations

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sharded import WeightInfo
from fsdp_runtime.sync.adapter_transfer import AdapterTransfer
from fsdp_runtime.sync.broadcast import flatten_bucket, send_weights, unflatten_bucket
from fsdp_runtime.sync.digests import digest, digest_layout, verify_transfer
from fsdp_runtime.sync.execute import execute_transfer
from fsdp_runtime.sync.groups import transfer_group
from fsdp_runtime.sync.model_layout import ModelShards
from fsdp_runtime.sync.vllm_source import WeightSource
from fsdp_runtime.sync.weight_sync import SyncReport, WeightSync
from fsdp_runtime.sync.weight_transfer import WeightTransfer
from fsdp_runtime.weights import Quantization, WeightExport

__all__ = [
    "AdapterTransfer",
    "ModelShards",
    "Quantization",
    "SyncReport",
    "WeightExport",
    "WeightInfo",
    "WeightSource",
    "WeightSync",
    "WeightSyncError",
    "WeightTransfer",
    "digest",
    "digest_layout",
    "execute_transfer",
    "flatten_bucket",
    "send_weights",
    "transfer_group",
    "unflatten_bucket",
    "verify_transfer",
]
