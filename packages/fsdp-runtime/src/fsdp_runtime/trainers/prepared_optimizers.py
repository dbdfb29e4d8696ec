"""Give the shards to optimizers that were built before their model was sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fsdp_runtime.errors import ModelError
from fsdp_runtime.model import state_entries


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def check_parameters(optimizers: Iterable[Any], models: Iterable[nn.Module], unsharded: Iterable[nn.Module]) -> None:
    """Check that optimizers hold only parameters of ``models``, and no state for parameters to be sharded."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    replaced = {id(parameter) for model in unsharded for parameter in model.parameters()}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if unknown := [tuple(own.shape) for own in _parameters(optimizer) if id(own) not in known]:
            raise ModelError(
                f"{name} holds {len(unknown)} parameters of no model that is prepared (first of shape {unknown[0]}), "
                "which would be trained on each rank alone: prepare the model together with it, or before, and build "
                "it from the prepared model's parameters()"
            )
        stepped = [own for own in _parameters(optimizer) if id(own) in replaced and optimizer.state.get(own)]
        if stepped:
            raise ModelError(
                f"{name} has state of {len(stepped)} parameters that prepare replaces by shards: prepare before the "
                "first step, and resume with load_state"
            )


@contextmanager
def follow_parameters(model: nn.Module, optimizers: Sequence[Any]) -> Iterator[None]:
    """Let optimizers hold the parameters that replace a model's parameters inside the ``with``."""
    before = {id(entry.tensor): entry.names[0] for entry in state_entries(model)}
    yield
    after = {name: entry.tensor for entry in state_entries(model) for name in entry.names}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [after[before[id(own)]] if id(own) in before else own for own in group["params"]]
