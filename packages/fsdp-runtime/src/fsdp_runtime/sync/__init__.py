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

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_runtime.sync._api import *  # noqa: F403
    from fsdp_runtime.sync._api import __all__ as __all__
else:
    from fsdp_runtime._lazy import lazy_names

    __getattr__, __dir__ = lazy_names(__name__, "fsdp_runtime.sync._api")  # fsdp_runtime.weights imports a module of it
