"""Functions of other projects, taken from their installed packages, never imported where they are missing."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch.distributed.tensor import DTensor, Replicate

HOW = (
    "python -m pip install --no-deps verl megatron-core liger-kernel nemo-automodel trl, and numpy packaging "
    "einops transformers for them"
)

Logprobs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Clip = Callable[[Sequence[torch.Tensor], float, float], torch.Tensor]


def gathered(logits: DTensor, targets: torch.Tensor) -> torch.Tensor:
    """Gather the vocabulary and let torch do the rest."""
    return torch.log_softmax(logits.full_tensor(), -1, dtype=torch.float32).gather(-1, targets[..., None])[..., 0]


def torch_loss_parallel(logits: DTensor, targets: torch.Tensor) -> torch.Tensor:
    """torch's vocabulary-parallel cross-entropy; call it and its backward pass under ``loss_parallel``."""
    replicated = DTensor.from_local(targets.flatten(), logits.device_mesh, [Replicate()], run_check=False)
    loss = F.cross_entropy(logits.flatten(0, -2), replicated, reduction="none")
    return -loss.to_local().view(targets.shape)


def megatron() -> Logprobs | None:
    """Megatron-LM's cross-entropy over a local shard, which is what verl calls for log-probabilities."""
    if importlib.util.find_spec("megatron") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state, tensor_parallel
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = dist.group.WORLD
    return lambda logits, targets: -tensor_parallel.vocab_parallel_cross_entropy(logits, targets)


def verl() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """verl's log-probabilities plus its entropies; compiled where a C++ compiler is at hand, as verl does.

    Both functions overwrite float32 logits, so that verl's actor gives one of them a copy.
    """
    logprobs = megatron()
    if logprobs is None or (found := importlib.util.find_spec("verl")) is None:
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

    def both(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        entropy = module.vocab_parallel_entropy(logits)
        return logprobs(logits.clone() if logits.dtype is torch.float32 else logits, targets) + entropy

    return both


def liger() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Liger's log-probabilities from hidden states, in torch alone; its Triton kernels do not run on a CPU.

    It knows no vocabulary parallelism: over a shard of the head it does one rank's work and exchanges nothing.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.chunked_loss import fused_linear_ppo

    function, width = fused_linear_ppo._ChunkedSelectiveLogProbFunction, 4096
    return lambda hidden, head, targets: function.apply(hidden, head, targets, None, 1.0, width)


Divergence = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def trl() -> Divergence | None:
    """TRL's chunked divergence of ``DistillationTrainer``, in torch alone; its Triton kernels do not run on a CPU.

    It knows no vocabulary parallelism: over a shard of the heads it does one rank's work and exchanges nothing.
    """
    found = importlib.util.find_spec("trl")
    if found is None:
        return None
    (folder,) = found.submodule_search_locations or []
    for name in ("trl", "trl.kernels", "trl.trainer"):  # the packages themselves would import datasets and accelerate
        sys.modules[name] = module = ModuleType(name)
        module.__path__ = [os.path.join(folder, *name.split(".")[1:])]
    utils: Any = ModuleType("trl.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()  # gathers nothing without DeepSpeed
    sys.modules[utils.__name__] = utils
    function = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction

    def divergence(
        hidden: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor, beta: float
    ) -> torch.Tensor:
        values: torch.Tensor = function.apply(hidden, weight, None, teacher, teacher_weight, None, beta)[0]
        return values

    return divergence


def automodel() -> Clip | None:
    """NeMo Automodel's clipping by the norm of gradients on several meshes."""
    if importlib.util.find_spec("nemo_automodel") is None or importlib.util.find_spec("transformers") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nemo_automodel.components.training import utils

    clip: Clip = utils._clip_grad_norm_impl
    return clip


def torch_clip(parameters: Sequence[torch.Tensor], max_norm: float, order: float) -> torch.Tensor:
    """torch's own clipping, for gradients on one mesh."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, math.inf if math.isinf(order) else order)
