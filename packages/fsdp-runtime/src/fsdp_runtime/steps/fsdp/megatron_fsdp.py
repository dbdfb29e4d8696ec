"""Megatron-FSDP (the successor of nvFSDP) instead of FSDP2, as an optional extra for CUDA."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_runtime.errors import BackendError, ModelError, OptionError
from fsdp_runtime.model.structure import ModelStructure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MegatronFSDP:
    """A checked call of ``megatron_fsdp.fully_shard_model``."""

    package: Any  # the imported module ``megatron_fsdp``
    mesh: DeviceMesh
    keywords: Mapping[str, Any]  # keywords of ``fully_shard_model``

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> tuple[nn.Module, Optimizer | None]:
        """Wrap the model, after any sharding over ``tp``, and let the optimizer step its shards."""
        wrapped: nn.Module = self.package.fully_shard_model(model, device_mesh=self.mesh, **self.keywords)
        if optimizer is not None:
            optimizer = self.package.fully_shard_optimizer(optimizer)
        logger.info("Megatron-FSDP over %s", self.keywords["dp_shard_dim"])
        return wrapped, optimizer


def resolve_megatron_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    structure: ModelStructure,
    *,
    dp_shard_dim: str,
    tp_dim: str | None = None,
    unit_modules: Sequence[type[nn.Module] | str] | None = None,
    main_params_dtype: torch.dtype | None = torch.float32,
    main_grads_dtype: torch.dtype | None = None,
    options: Mapping[str, Any] | None = None,
) -> MegatronFSDP:
    """Check that Megatron-FSDP can shard a model, and return the call; the model is not changed."""
    # The units are classes or their names, by default the classes of the blocks. A dtype of ``None`` is the dtype of
    # the parameters. ``options`` are further keywords of ``fully_shard_model``.
    megatron = _megatron()
    keywords = {
        "dp_shard_dim": dp_shard_dim,
        "tp_dim": tp_dim,
        "fsdp_unit_modules": _unit_classes(model, structure, unit_modules),
        "mixed_precision_policy": megatron.MixedPrecisionPolicy(
            main_params_dtype=main_params_dtype, main_grads_dtype=main_grads_dtype, grad_comm_dtype=main_grads_dtype
        ),
        **(options or {}),
    }
    known = inspect.signature(megatron.fully_shard_model).parameters
    if unknown := [name for name in keywords if name not in known]:
        version = getattr(megatron, "__version__", "of unknown version")
        raise OptionError(f"megatron-fsdp {version} takes no {', '.join(unknown)}: it takes {', '.join(known)}")
    return MegatronFSDP(megatron, mesh, keywords)


def _megatron() -> Any:
    try:
        module = importlib.import_module("megatron_fsdp")
    except ImportError as error:
        raise BackendError(
            f"Megatron-FSDP cannot be imported ({error}): pip install 'fsdp-runtime[megatron-fsdp]', or use "
            "parallelize, which shards with FSDP2"
        ) from error
    if not torch.cuda.is_available():
        raise BackendError("Megatron-FSDP needs a CUDA device and there is none: use parallelize, which runs anywhere")
    return module


def _unit_classes(
    model: nn.Module, structure: ModelStructure, units: Sequence[type[nn.Module] | str] | None
) -> list[type[nn.Module]]:
    """Return the unit classes that the model has: Megatron-FSDP divides by their number."""
    present = {type(module): None for module in model.modules()}
    if units is None:
        return list({type(block): None for block in structure.blocks.values()})
    names = {cls: (cls.__name__, f"{cls.__module__}.{cls.__qualname__}") for cls in present}
    chosen = [
        cls
        for cls in present
        if any(unit in names[cls] if isinstance(unit, str) else issubclass(cls, unit) for unit in units)
    ]
    if not chosen:
        blocks = ", ".join(sorted({type(block).__name__ for block in structure.blocks.values()}))
        raise ModelError(
            f"no module is of class {', '.join(map(str, units))}: the model's blocks are of class {blocks}"
        )
    return chosen
