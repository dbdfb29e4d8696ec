"""What of a model belongs into a checkpoint: parameters and persistent buffers, each once, with all its names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import persistent_buffers, sharded_parameters
from fsdp_runtime.errors import ConversionError

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


def require_plain(found: Sequence[Entry]) -> None:
    """Refuse weights that are packed in a form of their own, which neither read nor write as numbers.

    Raises:
        ConversionError: weights of a quantisation's own tensor class.
    """
    packed = [entry for entry in found if _class_of(entry.tensor) not in (Tensor, nn.Parameter, nn.Buffer)]
    if packed:
        raise ConversionError(
            f"{len(packed)} weights are of class {_class_of(packed[0].tensor).__name__}, first {packed[0].names[0]}: "
            "quantised weights are neither loaded nor streamed; dequantise the model, or quantise it at the receiver"
        )


def _class_of(tensor: Tensor) -> type[Tensor]:
    return type(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    shards = sharded_parameters(model)
    for path, module in model.named_modules(remove_duplicate=False):
        parts = [part for part in path.split(".") if part and part not in _WRAPPERS]
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield ".".join([*parts, name]), shards.get((module, name), parameter)
        for name, buffer in persistent_buffers(module).items():
            yield ".".join([*parts, name]), buffer
