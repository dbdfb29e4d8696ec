"""Activations in host memory between forward and backward.

A forward of a block copies every storage that autograd keeps for its backward, and drops the device's memory when the
next block has run.  Backward copies the storages of one block back while it computes the block after it.  Saved tensors
are views of storages: tensors on one storage share one copy, and keep sizes, strides and offsets.

Source of the method: ``torch.autograd.graph.save_on_cpu``; with streams, torchtune's ``OffloadActivations``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_runtime import _torch_compat as compat
from fsdp_runtime.memory import host_copies

#: Smaller storages stay on the device, as in torchtune's and TRL's ``OffloadActivations``.
MIN_BYTES = 1024


class _StorageCopy:
    """A storage that autograd keeps: on the device until its copy is complete, then on the host."""

    def __init__(self, source: Tensor, copies: host_copies.HostCopies) -> None:
        # ``source`` is a flat view of the whole storage: it keeps the storage alive, and shares its version.
        self.source: Tensor | None = source
        self.version = self.last_version = compat.tensor_version(source)
        self.restored: Tensor | None = None
        self.loaded: Any = None  # the event behind ``restored``
        self.nbytes, self.copies = source.nbytes, copies
        copies.held.add(self.nbytes)
        self.host = copies.to_host(source)

    def __del__(self) -> None:
        self.copies.held.now -= self.nbytes
        self.drop()  # a saved tensor that backward does not read

    def load(self) -> bool:
        """Begin to copy the storage back to the device; return ``False`` if it is there."""
        if self.source is not None or self.restored is not None:
            return False
        self.restored = self.copies.to_device(self.host)
        return True

    def drop(self) -> None:
        """Free the storage that was copied back, behind its copy in the order of the current stream."""
        if self.restored is not None:
            self.copies.wait(self.loaded)
            self.restored = None

    def require_unchanged(self) -> None:
        """Raise torch's error if an operator wrote into the storage before its copy was complete."""
        if self.source is not None:
            self.last_version = compat.tensor_version(self.source)
        compat.require_version(self.host, self.last_version, self.version)

    def free_source(self) -> None:
        """Free the storage on the device."""
        if self.source is not None:
            self.last_version = compat.tensor_version(self.source)
        self.source = None


@dataclass(frozen=True)
class _SavedView:
    """A saved tensor: a view of a copied storage, and the layout of its DTensor."""

    block: BlockActivations
    storage: _StorageCopy
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any  # an int, or a symbol in a traced graph
    dtensor: tuple[Any, ...] | None


class BlockActivations:
    """The storages of one forward of a block; saved tensors hold this object until their backward."""

    def __init__(self, module: nn.Module, arguments: Any, order: ActivationOrder) -> None:
        tensors = [leaf for leaf in compat.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        self.order, self.module = order, module
        self.device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        self.copies = host_copies.make_copies(self.device)
        self.copied: Any = None  # the event behind the copies to the host
        self.previous: Any = _nothing  # of the block that ran before; a weak reference
        self._shared = [tensor for tensor in tensors if not tensor.requires_grad]
        self._left: set[int] = set()
        self._left_is_final = False
        self._by_storage: dict[Any, _StorageCopy] = {}
        self._storages: list[Any] = []  # weak references: a storage's memory is freed with its last saved tensor

    def pack(self, tensor: Tensor) -> Any:
        """Return a saved tensor's record, in place of the tensor."""
        local = compat.waited(compat.local_tensor(tensor))
        if (storage := self._copied(tensor, local)) is None:
            return compat.with_version(tensor)
        layout = None
        if isinstance(tensor, DTensor):
            layout = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        return _SavedView(self, storage, local.size(), local.stride(), local.storage_offset(), layout)

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        """Return the saved tensor of a record."""
        if not isinstance(saved, _SavedView):
            return compat.unchanged(saved)
        flat = saved.block._on_device(saved.storage)
        local = flat.as_strided(saved.size, saved.stride, saved.offset)
        if saved.dtensor is None:
            return local
        mesh, placements, shape, stride = saved.dtensor
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def finish(self) -> None:
        """End the block's forward: the storages of the block that ran before leave the device."""
        self.copied = self.copies.record()
        self._by_storage.clear()
        self._shared.clear()
        self.previous = self.order.ran(self)

    def free_sources(self) -> None:
        """Free the copied storages on the device, in the order of the current stream."""
        if any(storage.source is not None for storage in self._alive()):
            self.copies.wait(self.copied)
            for storage in self._alive():
                storage.free_source()

    def load(self) -> None:
        """Begin to copy the storages back to the device."""
        begun = [storage for storage in self._alive() if storage.load()]
        event = self.copies.record() if begun else None
        for storage in begun:
            storage.loaded = event

    def drop(self) -> None:
        """Free the storages that were copied back."""
        for storage in self._alive():
            storage.drop()

    def _on_device(self, storage: _StorageCopy) -> Tensor:
        if compat.in_backward():
            self.order.reads(self)
        storage.require_unchanged()
        if storage.source is not None:
            return storage.source
        self.load()
        self.copies.wait(storage.loaded)
        flat = storage.restored
        if not compat.in_backward():
            self.drop()
        return flat  # type: ignore[return-value]  # loaded above

    def _alive(self) -> Iterator[_StorageCopy]:
        return (storage for ref in self._storages if (storage := ref()) is not None)

    def _copied(self, tensor: Tensor, local: Tensor) -> _StorageCopy | None:
        """Return the copy of a tensor's storage; ``None`` if others hold the storage, or it is not worth a copy."""
        if isinstance(tensor, nn.Parameter) or isinstance(compat.viewed_tensor(tensor), nn.Parameter):
            return None
        if local.device != self.device or local.layout is not torch.strided or compat.wraps_tensors(local):
            return None
        storage = local.untyped_storage()
        nbytes, key = storage.nbytes(), (compat.storage_key(storage), compat.tensor_version(local), local.dtype)
        if nbytes < MIN_BYTES or nbytes % local.itemsize or local.is_conj() or local.is_neg():
            return None
        if key not in self._by_storage:
            if key[0] in self._left_storages():
                return None
            flat = local.detach().as_strided((nbytes // local.itemsize,), (1,), 0)
            self._by_storage[key] = _StorageCopy(flat, self.copies)
            self._storages.append(weakref.ref(self._by_storage[key]))
        return self._by_storage[key]

    def _left_storages(self) -> set[int]:
        """Return the storages of parameters, buffers and arguments without gradients, such as a mask of all blocks."""
        # FSDP2 has gathered the block's parameters by now.  A part that it wraps gathers its own at each forward.
        if not self._left_is_final:
            held = (*self._shared, *self.module.parameters(), *self.module.buffers())
            self._left = {compat.storage_key(compat.local_tensor(tensor)) for tensor in held}
            parts = (part for part in self.module.modules() if part is not self.module)
            self._left_is_final = not any(isinstance(part, FSDPModule) for part in parts)
        return self._left


def _nothing() -> None:
    return None


@dataclass(eq=False)
class ActivationOrder:
    """The blocks of a model in the order of their forwards; backward reads them from the last to the first."""

    last: Any = _nothing
    read: Any = _nothing

    def ran(self, block: BlockActivations) -> Any:
        """Note that a block's forward has ended; return a weak reference to the block before."""
        previous, self.last = self.last, weakref.ref(block)
        if (before := previous()) is not None:
            before.free_sources()
        return previous

    def reads(self, block: BlockActivations) -> None:
        """Note that backward reads a block: copy its storages back, and begin with the storages of the block before."""
        if (current := self.read()) is block:
            return
        if current is not None:
            current.drop()
        self.read = weakref.ref(block)
        block.load()
        if (before := block.previous()) is not None:
            before.load()
        compat.after_backward(self._drop_all)

    def _drop_all(self) -> None:
        for block in (self.read(), None if self.read() is None else self.read().previous()):
            if block is not None:
                block.drop()
        self.read = _nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOrder:
        return ActivationOrder()


_running: ContextVar[BlockActivations | None] = ContextVar("running", default=None)


def running_block() -> BlockActivations | None:
    """Return the block that runs forward now, if its activations go to the host."""
    return _running.get()


@contextmanager
def activations_on_host(module: nn.Module, arguments: Any, order: ActivationOrder) -> Iterator[None]:
    """Keep the tensors that a block's forward saves for backward in host memory."""
    block = BlockActivations(module, arguments, order)
    token = _running.set(block)
    try:
        with saved_tensors_hooks(block.pack, block.unpack):
            yield
    finally:
        _running.reset(token)
        block.finish()
