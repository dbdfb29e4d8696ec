"""Optimizers that cannot step shards: torch would raise in the middle of a step, after it has changed some of them."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime.errors import ModelError

#: What optimizers of torch and transformers do, by the names of their classes, that DTensors cannot.
_CANNOT = {
    "Rprop": "writes to the elements whose gradients change their sign",
    "Adafactor": "updates means of rows and columns in place",
    "LBFGS": "makes one vector of all parameters, which takes DTensors alone, of parts of equal size",
}


@cache
def refuse_optimizers_of_full_tensors() -> None:
    """Check the kind of every optimizer at its steps, once per process."""
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: Optimizer, *_: Any) -> None:
    kind = next((each for each in type(optimizer).__mro__ if each.__name__ in _CANNOT), None)
    if kind is None or kind.__module__.partition(".")[0] not in ("torch", "transformers"):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shards = [each for each in parameters if isinstance(each, DTensor)]
    one_vector = kind.__name__ == "LBFGS" and len(shards) == len(parameters) and all(map(_is_even, shards))
    if shards and not one_vector:
        raise ModelError(
            f"{kind.__name__} {_CANNOT[kind.__name__]}, and {len(shards)} of its {len(parameters)} parameters are "
            "shards: take an optimizer that steps each element alone, as AdamW does"
        )


def _is_even(shard: DTensor) -> bool:
    axes = range(shard.device_mesh.ndim)
    ranks = prod(shard.device_mesh.size(axis) for axis in axes if not shard.placements[axis].is_replicate())
    return local_tensor(shard).numel() * ranks == shard.numel()
