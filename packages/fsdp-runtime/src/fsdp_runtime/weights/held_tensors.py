"""Detect that a model's tensors or adapters were replaced since an export was prepared."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from fsdp_runtime._peft_compat import adapters_in_force
from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime.model.state import StateEntry, state_entries


class HeldTensors:
    """A model's tensors and adapters at one moment; the object keeps the tensors' memory alive."""

    # Tensors are compared by their memory: ``.to()`` moves a parameter's data and keeps the parameter; offloading
    # empties the storage and keeps it.

    def __init__(self, model: nn.Module, entries: Sequence[StateEntry] | None = None) -> None:
        entries = state_entries(model) if entries is None else entries
        self._model, self._adapters = model, adapters_in_force(model)
        self._tensors = [local_tensor(entry.tensor).detach() for entry in entries]

    def difference(self) -> str | None:
        """Return a message if tensors or adapters were replaced since construction, else ``None``."""
        pairs = itertools.zip_longest(state_entries(self._model), self._tensors)
        replaced = [
            entry for entry, held in pairs if entry is None or held is None or _memory(entry.tensor) != _memory(held)
        ]
        if replaced:
            first = f" (first {replaced[0].names[0]})" if replaced[0] else ""
            return f"{len(replaced)} of the model's tensors were replaced{first}"
        return None if self._adapters == adapters_in_force(self._model) else "the adapters have changed"


def _memory(tensor: Tensor) -> tuple[object, ...]:
    local = local_tensor(tensor)
    start = local.untyped_storage().data_ptr()
    return local.device, local.dtype, local.shape, local.stride(), local.storage_offset(), start
