"""Refuse adapters that are added to a ``PeftModel`` after it was sharded.

peft would draw other values for them on every rank, and nothing would shard them or sum their gradients.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from fsdp_runtime._peft_compat import is_peft_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.wrap import hook_model


def refuse_later_adapters(model: Any) -> None:
    """Let a ``PeftModel`` refuse new adapters; any other model stays as it is."""
    if is_peft_model(model):
        model.__dict__["add_adapter"] = _refuse_to_add
        hook_model(model, "refuses new adapters", _RequireKnown(model, frozenset(model.peft_config)))


def _refuse_to_add(adapter_name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise _error(adapter_name)


@dataclass(frozen=True, eq=False)
class _RequireKnown:
    """Before a forward: checks that the model has no other adapters than when it was sharded."""

    model: Any
    names: Set[str]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if added := sorted(set(self.model.peft_config) - self.names):
            raise _error(added[0])


def _error(adapter: str) -> OptionError:
    return OptionError(
        f"the adapter {adapter!r} was added after parallelize, and is not sharded: add all adapters before, and choose "
        f"with set_adapter; model.delete_adapter({adapter!r}) removes it"
    )
