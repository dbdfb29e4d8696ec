"""The tensors of a model's state dict: parameters and persistent buffers; a tied tensor once, with all its names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime._torch_compat import local_tensor, persistent_buffers, sharded_parameters
from fsdp_runtime.errors import ModelError
from fsdp_runtime.runtime_state import RUNTIME_STATE

#: Path components that activation checkpointing wrappers and ``torch.compile`` add.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True)
class StateEntry:
    """One tensor of a model's state dict."""

    names: tuple[str, ...]  # in model order; tied tensors have several
    tensor: Tensor  # for a parameter that FSDP2 has gathered, its shard
    module: nn.Module  # the first module that owns the tensor
    attribute: str
    ranks: tuple[int, ...] | None = None  # global ranks with the tensor; ``None`` for all ranks of the model
    is_absent: bool = False  # another pipeline stage has the tensor, and ``tensor`` is empty


def state_entries(model: nn.Module, *, allow_offloaded: bool = False) -> list[StateEntry]:
    """Return the tensors of a model's state dict in model order; a tied tensor once, with all its names."""
    if (waits := getattr(model.__dict__.get(RUNTIME_STATE), "arriving", None)) is not None:
        waits()
    entries: dict[int, StateEntry] = {}
    for name, tensor, module, attribute in _named_tensors(model):
        known = entries.get(id(tensor))
        if known is None:
            entries[id(tensor)] = StateEntry((name,), tensor, module, attribute)
        else:
            entries[id(tensor)] = replace(known, names=(*known.names, name))
    if not allow_offloaded:
        require_memory({entry.names[0]: entry.tensor for entry in entries.values()}, "parameters and buffers")
    return list(entries.values())


def is_freed(tensor: Tensor) -> bool:
    """Return True if a tensor has elements and its memory was freed, as :func:`fsdp_runtime.offload` does."""
    local = local_tensor(tensor)
    is_plain = type(local) in (Tensor, nn.Parameter, nn.Buffer)  # wrapper subclasses have no storage
    return is_plain and not local.is_meta and bool(local.numel()) and not local.untyped_storage().nbytes()


def require_memory(tensors: Mapping[str, Tensor], kind: str) -> None:
    """Check that no tensor is freed, since a read ends the process; ``kind`` names the tensors in words."""
    freed = [name for name, tensor in tensors.items() if is_freed(tensor)]
    if freed:
        raise ModelError(
            f"{len(freed)} {kind} are offloaded to host memory (first {freed[0]}): call onload(model) first"
        )


def refresh_buffers(entries: Sequence[StateEntry]) -> list[StateEntry]:
    """Return the entries with the buffers that their modules hold now; parameters keep their identity."""
    return [
        entry
        if isinstance(entry.tensor, nn.Parameter)
        else replace(entry, tensor=getattr(entry.module, entry.attribute))
        for entry in entries
    ]


def reshard_all(model: nn.Module) -> None:
    """Free every parameter that FSDP2 has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module, str]]:
    shards = sharded_parameters(model)
    for path, module in model.named_modules(remove_duplicate=False):
        parts = [part for part in path.split(".") if part and part not in _WRAPPERS]
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield ".".join([*parts, name]), shards.get((module, name), parameter), module, name
        for name, buffer in persistent_buffers(module).items():
            yield ".".join([*parts, name]), buffer, module, name
