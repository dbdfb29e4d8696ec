"""What of a model belongs into a checkpoint: parameters and persistent buffers, each once, with all its names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fsdp_runtime._torch_compat import persistent_buffers, sharded_parameters

#: What activation checkpointing wrappers and ``torch.compile`` put into module paths.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True)
class Entry:
    """One tensor of the model, FSDP2's shards for a gathered parameter, and its names in model order."""

    names: tuple[str, ...]
    tensor: Tensor


def entries(model: nn.Module) -> list[Entry]:
    """The tensors of the model's state dict in model order; tied ones once, under all their names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in _named_tensors(model):
        tensors[id(tensor)] = tensor
        names.setdefault(id(tensor), []).append(name)
    return [Entry(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    shards = sharded_parameters(model)
    for path, module in model.named_modules(remove_duplicate=False):
        parts = [part for part in path.split(".") if part and part not in _WRAPPERS]
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield ".".join([*parts, name]), shards.get((module, name), parameter)
        for name, buffer in persistent_buffers(module).items():
            yield ".".join([*parts, name]), buffer
