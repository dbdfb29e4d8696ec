"""Functions of other projects, taken from their installed packages, never imported where they are missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch.distributed.tensor import DTensor, Replicate

HOW = "python -m pip install --no-deps verl megatron-core, and numpy packaging einops for them"


def gathered(logits: DTensor, targets: torch.Tensor) -> torch.Tensor:
    """Gather the vocabulary and let torch do the rest."""
    return torch.log_softmax(logits.full_tensor(), -1, dtype=torch.float32).gather(-1, targets[..., None])[..., 0]


def torch_loss_parallel(logits: DTensor, targets: torch.Tensor) -> torch.Tensor:
    """torch's vocabulary-parallel cross-entropy; call it and its backward pass under ``loss_parallel``."""
    replicated = DTensor.from_local(targets.flatten(), logits.device_mesh, [Replicate()], run_check=False)
    loss = F.cross_entropy(logits.flatten(0, -2), replicated, reduction="none")
    return -loss.to_local().view(targets.shape)


def megatron() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Megatron-LM's cross-entropy over a local shard, which is what verl calls for log-probabilities."""
    if importlib.util.find_spec("megatron") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state, tensor_parallel
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = dist.group.WORLD
    return lambda logits, targets: -tensor_parallel.vocab_parallel_cross_entropy(logits, targets)


def verl_entropy() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """verl's entropy over a local shard; compiled where a C++ compiler is at hand, as verl does."""
    if megatron() is None or (found := importlib.util.find_spec("verl")) is None:
        return None
    if shutil.which("g++") is None:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    (folder,) = found.submodule_search_locations or []
    path = os.path.join(folder, "utils", "megatron", "tensor_parallel.py")
    spec = importlib.util.spec_from_file_location("verl_tensor_parallel", path)
    if spec is None or spec.loader is None:
        return None
    module: ModuleType = importlib.util.module_from_spec(spec)  # the package itself would import Ray
    spec.loader.exec_module(module)
    function: Callable[[torch.Tensor], torch.Tensor] = module.vocab_parallel_entropy
    return function
