"""Refuse adapters that are added to a ``PeftModel`` after it was sharded.

peft would draw other values for them on every rank, and nothing would shard them or sum their gradients.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_runtime._peft_compat import is_peft_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.wrap import hook_model


def refuse_later_adapters(model: Any) -> None:
    """Let the forward of a ``PeftModel`` refuse new adapters; any other model stays as it is."""
    if is_peft_model(model):
        hook_model(model, "refuses new adapters", _RequireKnown(model, frozenset(model.peft_config)))


@dataclass(frozen=True, eq=False)
class _RequireKnown:
    """Before a forward: checks that the model has no other adapters than when it was sharded."""

    model: Any
    names: Set[str]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if added := sorted(set(self.model.peft_config) - self.names):
            raise OptionError(
                f"the adapter {added[0]!r} was added after parallelize, and is not sharded: add all adapters before, "
                f"and choose with set_adapter; model.delete_adapter({added[0]!r}) removes it"
            )
