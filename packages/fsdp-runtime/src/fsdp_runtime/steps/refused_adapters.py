"""Refuse adapters that shards cannot compute, and adapters that are added after the sharding."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from fsdp_runtime._peft_compat import is_peft_model
from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.wrap import hook_forward, hook_model


def refuse_adapters(path: str, reason: str) -> NoReturn:
    """Refuse the adapters of a layer or of stacked experts."""
    raise OptionError(
        f"{path} carries adapters that are merged, or not plain LoRA on a linear layer or on stacked experts "
        f"({reason}): unmerge them, or leave it out of target_modules and target_parameters"
    )


def refuse_later_adapters(model: Any) -> None:
    """Let a model's forward refuse adapters that it does not have yet."""
    # peft would draw different values on every rank, and nothing would shard them or sum their gradients. A later
    # ``PeftModel`` skips the hooks of the model's forward, but runs the hooks of the models inside.
    require = _RequireKnown(model, frozenset(_adapters(model)))
    if is_peft_model(model):
        hook_model(model, "refuses new adapters", require)
        return
    for module in {model, *filter(is_transformers_model, model.modules())}:
        hook_forward(module, "refuses new adapters", before=require)


def _adapters(model: Any) -> Iterable[str]:
    return getattr(model, "peft_config", None) or ()


@dataclass(frozen=True, eq=False)
class _RequireKnown:
    """Before a forward: checks that the model has no other adapters than when it was sharded."""

    model: Any
    names: Set[str]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if added := sorted({*_adapters(self.model), *_adapters(module)} - self.names):
            raise OptionError(
                f"the adapter {added[0]!r} was added after parallelize, and is not sharded: add all adapters before, "
                f"and choose with set_adapter; model.delete_adapter({added[0]!r}) removes it"
            )
