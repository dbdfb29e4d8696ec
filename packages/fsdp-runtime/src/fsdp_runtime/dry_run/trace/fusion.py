"""Materialized results of a compiled module: a compiler fuses all other results into the kernels that read them.

Separate kernels are matrix products, attention, collectives and operators that sort, scatter or count.  Between two
of them a compiler fuses all other operators: a result that only fused operators read, before the next kernel or all in
one operator, is never written.  A fused result that only fused operators of backward need is computed again
there, so its sources live until then instead.  A result that a kernel of backward reads is kept, because backward would
have to write it (``ban_recompute_materialized_backward`` of ``torch._functorch.config``, for ``solve_min_cut`` in
``partitioners.py`` beside it; torch 2.11 to 2.15).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_runtime._torch_compat import operator_name
from tp_plans.model_tree import is_at_or_below

#: Parts of the names of operators that are separate kernels.
_KERNELS: tuple[str, ...] = ("mm", "attention", "conv", "sort", "topk", "nonzero", "scatter", "index_put", "index_add")
_KERNELS += ("cumsum", "histc", "bincount", "unique", "empty", "zeros", "foreach", "embedding", "resize", "linear")
_VIEWS = ("view", "transpose", "t", "permute", "expand", "detach", "alias", "slice", "select", "unsqueeze", "squeeze")


@dataclass(eq=False)
class FusedStorage:
    """A storage that operators of a compiled module made."""

    index: int  # its index in the recording
    part: tuple[Any, str]  # phase and module in which it was made
    group: int  # number of kernels that ran before it
    kernel: bool  # whether a separate kernel made it
    sources: list[FusedStorage] = field(default_factory=list)  # storages that the operator read
    read_by_kernel: bool = False  # whether a kernel of the same part read it
    read_after: int = 0  # readers after the next kernel of the part
    readers: int = 0  # fused operators of the same part that read it
    read_elsewhere: set[tuple[Any, str]] = field(default_factory=set)  # readers in the next module, or backward
    kept_for_kernel: bool = False  # whether a kernel of backward reads it
    last_read: int = 0  # number of allocations when its own part read it last

    @property
    def materialized(self) -> bool:
        """Whether the part in which it was made writes it."""
        return (
            self.kernel
            or self.read_by_kernel
            or self.kept_for_kernel
            or any(phase == self.part[0] for phase, _ in self.read_elsewhere)
            or (self.read_after > 0 and self.readers > 1)
        )

    @property
    def recomputed(self) -> bool:
        """Whether backward computes it again instead of keeping it."""
        kept = self.kernel or self.kept_for_kernel
        return not kept and all(phase != self.part[0] for phase, _ in self.read_elsewhere)


class Fusion:
    """Follow the operators of compiled modules, given by their paths."""

    def __init__(self, compiled: Sequence[str]) -> None:
        self._compiled = compiled
        self._group = 0
        self._kernel = True
        self._part: tuple[Any, str] | None = None
        self._sources: list[FusedStorage] = []

    def note(self, function: Any, phase: Any, module: str, read: list[FusedStorage], position: int) -> None:
        """Note an operator of a module, the storages that it reads, and the number of allocations so far."""
        if function.namespace == "prim":  # questions about tensors
            return
        path = next((path for path in self._compiled if is_at_or_below(module, path)), "")
        part = (phase, path)
        name = operator_name(function).strip("_")
        self._kernel = not path or function.namespace != "aten" or any(word in name for word in _KERNELS)
        self._part = part if path else None
        self._sources = read
        if name in _VIEWS:
            return
        if self._kernel:
            self._group += 1
        for storage in read:
            if storage.part != part:
                storage.read_elsewhere.add(part)
                storage.kept_for_kernel |= self._kernel and phase == "backward"
                continue
            storage.last_read = position
            if self._kernel:
                storage.read_by_kernel = True
            else:
                storage.readers += 1
                storage.read_after += storage.group != self._group

    def created(self, index: int) -> FusedStorage | None:
        """Return the record of a result of the last noted operator, ``None`` outside compiled modules."""
        if self._part is None:
            return None
        return FusedStorage(index, self._part, self._group, self._kernel, list(self._sources))
