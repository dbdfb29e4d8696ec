"""The state of a whole model in pipeline stages: this rank's tensors, and empty tensors in place of all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._torch_compat import own_parameters
from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.runtime_state import RUNTIME_STATE, RuntimeState


def stages_of(model: nn.Module) -> Any:
    """Return the record of a model in pipeline stages, ``None`` for any other; refuse a part of such a model."""
    root = model.__dict__.get(RUNTIME_STATE)
    if root is not None and root.stages is not None:
        return root.stages
    if any(state.stages is not None or state.part is not None for state in _recorded_states(model)):
        raise ModelError(
            f"{type(model).__name__} is a part of a model in pipeline stages, or a module around one: pass the model "
            "that parallelize returned"
        )
    return None


def recorded_meshes(model: nn.Module) -> Iterator[DeviceMesh]:
    """Yield the meshes that a model, or parts of a model, were parallelized on."""
    return (state.mesh for state in _recorded_states(model) if state.mesh is not None)


def _recorded_states(model: nn.Module) -> Iterator[RuntimeState]:
    return (module.__dict__[RUNTIME_STATE] for module in model.modules() if RUNTIME_STATE in module.__dict__)


def whole_entries(model: nn.Module, entries: Sequence[StateEntry]) -> list[StateEntry]:
    """Return the state entries of the whole model, equal on every rank; tensors of other stages are on meta."""
    if (stages := stages_of(model)) is None:
        return list(entries)
    present, whole = {entry.names: entry for entry in entries}, []
    for recorded in stages.state:
        entry = present.pop(recorded.names, None)
        if recorded.is_absent:
            whole.append(recorded)
        elif entry is None or _form(entry) != _form(recorded):
            now = "removed or renamed" if entry is None else f"{_form(entry)}"
            raise ModelError(
                f"{recorded.names[0]} was {_form(recorded)} when parallelize divided the model into stages, and is "
                f"{now} now: other ranks cannot know; change the model before parallelize"
            )
        else:
            whole.append(replace(entry, ranks=recorded.ranks))
    if present:
        raise ModelError(
            f"{len(present)} tensors were added to a model in pipeline stages, first {next(iter(present))[0]}: other "
            "ranks cannot know; change the model before parallelize"
        )
    return whole


@contextmanager
def with_absent_tensors(entries: Sequence[StateEntry]) -> Iterator[None]:
    """Let modules hold the empty tensors of other stages inside the ``with``, for code that reads their names."""
    absent = [
        (own_parameters(entry.module), entry)
        for entry in entries
        if entry.is_absent and entry.attribute in own_parameters(entry.module)
    ]
    for parameters, entry in absent:
        parameters[entry.attribute] = cast(nn.Parameter, entry.tensor)
    try:
        yield
    finally:
        for parameters, entry in absent:
            parameters[entry.attribute] = None


def _form(entry: StateEntry) -> str:
    return f"{str(entry.tensor.dtype).removeprefix('torch.')} of shape {tuple(entry.tensor.shape)}"
