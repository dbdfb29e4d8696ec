"""A user's typed program: a model on a mesh, its weights and its state."""

from pathlib import Path
from typing import assert_type

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_runtime import (
    FSDP2,
    MeshSpec,
    load_training_state,
    load_weights,
    parallelize,
    save_training_state,
    save_weights,
    stream_weights,
)
from fsdp_runtime.dry_run import Estimate, estimate
from fsdp_runtime.errors import OptionError
from fsdp_runtime.steps import ContextParallel


def sharded(model: nn.Module, directory: Path) -> nn.Module:
    mesh = MeshSpec(dp_shard=-1, tp=2).build(device_type="cpu")
    options = FSDP2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    method = ContextParallel("ring", load_balancer=None)
    try:
        model = parallelize(model, mesh, context_parallel=method, activation_checkpointing="block", fsdp=options)
    except OptionError as error:
        raise SystemExit(str(error)) from error
    load_weights(model, directory)
    return model


def saved(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> dict[str, torch.Tensor]:
    save_weights(model, directory / "weights")
    assert_type(save_training_state(directory, model, optimizer, step=1), Path)
    load_training_state(directory, model, optimizer)
    return dict(stream_weights(model))


def fits(config: Path) -> bool | None:
    found = estimate(config, {"dp_shard": 8}, seq_len=4096, device_memory="80GiB")
    assert_type(found, Estimate)
    return found.fits
