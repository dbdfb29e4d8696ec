"""Settings of accelerate's ``Accelerator`` that a mesh of this package supports or refuses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.errors import OptionError

_MESH = "the mesh says how models are sharded: MeshSpec(...), and parallelize_kwargs"
_REFUSED = {
    **dict.fromkeys(
        ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin"), _MESH
    ),
    "parallelism_config": _MESH,
    **dict.fromkeys(("dynamo_backend", "dynamo_plugin"), "compile blocks: parallelize_kwargs={'compile': True}"),
}
#: Environment variables that ``accelerate launch`` sets from a configuration file.
_ENVIRONMENT = tuple(f"ACCELERATE_USE_{kind}" for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"))
_PRECISIONS = (None, "no", "bf16")


def accelerator_settings(mesh: DeviceMesh, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``Accelerator`` for a mesh."""
    for name, instead in _REFUSED.items():
        if settings.get(name) not in (None, "no"):
            raise OptionError(f"{name} cannot be used on a mesh: {instead}")
    if variables := [name for name in _ENVIRONMENT if os.environ.get(name, "false").lower() == "true"]:
        raise OptionError(f"{variables[0]}=true asks accelerate to shard models itself: start the script with torchrun")
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise OptionError(f"ACCELERATE_DYNAMO_BACKEND cannot be used on a mesh: {_REFUSED['dynamo_backend']}")
    precision = settings.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in _PRECISIONS:
        raise OptionError(f"mixed_precision={precision!r} scales losses or replaces layers: use 'bf16', or 'no'")
    loading = settings.get("dataloader_config") or DataLoaderConfiguration()
    if loading.dispatch_batches:
        raise OptionError("dispatch_batches=True: every rank reads its own batches: leave it out, or False")
    loading.dispatch_batches = False  # None deals the batches of an iterable data set from one rank of the world
    return {**settings, "dataloader_config": loading, "cpu": settings.get("cpu", mesh.device_type == "cpu")}


def check_ranks(accelerator: Accelerator, mesh: DeviceMesh) -> None:
    """Raise :class:`OptionError` if accelerate's setup differs, or counts other ranks than the mesh has."""
    state = accelerator.state
    kinds = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
    if state.distributed_type in kinds or state.parallelism_config is not None:
        raise OptionError(
            f"accelerate is set up for {state.distributed_type.value}: start the script with torchrun, and make the "
            "Accelerator on a mesh before any other"
        )
    if state.mixed_precision not in _PRECISIONS:
        precision = f"mixed_precision={state.mixed_precision!r}"
        raise OptionError(f"an earlier Accelerator of this process has {precision}: use 'bf16' or 'no'")
    if state.num_processes != mesh.size():
        raise OptionError(
            f"accelerate counts {state.num_processes} processes and the mesh has {mesh.size()} ranks: start the script "
            "with torchrun, build the mesh over all ranks, and on CPUs set use_cpu=True in the training arguments"
        )
