"""Send the weights of a training model to an engine.

Options of every export:

``WeightExport``      dtype, names, precision and bucket size; ``describe``, ``stream`` and ``buckets`` of a model
``Quantization``      FP8, MXFP8 or NVFP4 with scales, as checkpoints store them
``WeightInfo``        name, dtype and shape of one weight

Full tensors, gathered on the trainer:

``send_weights``      broadcast, a bucket at a time; ``flatten_bucket`` and ``unflatten_bucket``: its bytes
``WeightSource``      the same weights as vLLM's trainer engines ask for them
``WeightTransfer``    updates of a vLLM server by either method, as TRL's AsyncGRPOTrainer asks for them
``AdapterTransfer``   adapters only, as versions that a vLLM server reads

Shards to shards, without a full tensor:

``ModelShards``       the layout of blocks on ranks, and this rank's tensors
``execute_transfer``  one transfer by a plan of ``tp_plans.transfer.plan_transfer``
``WeightSync``        repeated updates: changed elements, along a chain of versions; ``SyncReport`` counts the bytes
``transfer_group``    a process group of trainer and engines that are separate jobs

Check the received weights:

``verify_transfer``   every block of the destination against its source
``digest``            one number per weight of a model; ``digest_layout``: per tensor of a layout
``WeightSyncError``   the error of a failed update
"""

from __future__ import annotations

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sharded import WeightInfo
from fsdp_runtime.sync.adapter_transfer import AdapterTransfer
from fsdp_runtime.sync.adapter_transfer import require_servable as require_servable
from fsdp_runtime.sync.broadcast import flatten_bucket, send_weights, unflatten_bucket
from fsdp_runtime.sync.digests import digest, digest_layout, verify_transfer
from fsdp_runtime.sync.execute import execute_transfer
from fsdp_runtime.sync.groups import transfer_group
from fsdp_runtime.sync.model_layout import ModelShards
from fsdp_runtime.sync.vllm_source import WeightSource
from fsdp_runtime.sync.weight_sync import SyncReport, WeightSync
from fsdp_runtime.sync.weight_transfer import WeightTransfer
from fsdp_runtime.sync.weight_transfer import on_every_rank as on_every_rank
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
