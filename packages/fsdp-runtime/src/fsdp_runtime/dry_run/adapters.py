"""Low-rank adapters (PEFT's) of a model that a dry run builds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_runtime.errors import EstimateError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class WithAdapters:
    """Build a model with low-rank adapters, all other parameters frozen."""

    source: Any  # any model argument of ``estimate``
    rank: int = 16  # of the adapters

    def __post_init__(self) -> None:
        """Raise :class:`EstimateError` for a rank that is not positive."""
        if self.rank < 1:
            raise EstimateError(f"rank={self.rank} of LoRA: give a positive integer")

    def __call__(self) -> nn.Module:
        """Return the adapted model."""
        from fsdp_runtime.dry_run.build_model import model_builder  # torch, when the model is built

        return _with_lora(model_builder(self.source), self.rank)


def _with_lora(build: Callable[[], nn.Module], rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise EstimateError("LoRA needs peft: pip install peft, or leave lora out") from error
    model = build()
    excluded = not_adapted(model)
    options = {"exclude_modules": list(excluded)} if excluded else {}
    adapters = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    adapted: nn.Module = get_peft_model(model, adapters)
    return adapted


def not_adapted(model: nn.Module) -> tuple[str, ...]:
    """Return names of linear layers without LoRA: routers, which return several tensors, and layers PEFT refuses."""
    from torch import nn  # with the model

    from fsdp_runtime._peft_compat import refused_by_lora

    classes = {
        path.rpartition(".")[2]: None
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    }
    return (*classes, *refused_by_lora(model))
