"""Freeing a device between phases: parameters, gradients, buffers and optimizer state to host memory and back.

Tensors keep their identity: their storages are emptied and later filled again, so DTensors, FSDP2's views of its
shards, ties and the optimizer's references all stay valid.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_runtime._torch_compat import leaves
from fsdp_runtime.errors import ModelError, OffloadError, OptionError
from fsdp_runtime.memory.unshard import is_held
from fsdp_runtime.model.materialize import compute_device
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.runtime_state import runtime_state

logger = logging.getLogger(__name__)

Part = Literal["parameters", "gradients", "buffers", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class OffloadReport:
    """What one call of :func:`offload` or :func:`onload` moved on this rank.

    Args:
        bytes_moved: by part; what several parts share is counted in the first.
        allocated_before: bytes allocated on the device before the call; ``None`` for the CPU, which does not tell.
        allocated_after: and after it.
    """

    bytes_moved: Mapping[Part, int]
    allocated_before: int | None
    allocated_after: int | None

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.bytes_moved.values())


@dataclass
class _Offloaded:
    """The storages of a model that are in host memory, by part, and the guards against using them."""

    device: torch.device
    storages: dict[Part, list[tuple[UntypedStorage, Tensor]]] = field(default_factory=dict)
    guards: dict[int, Any] = field(default_factory=dict)


def offload(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    parts: Iterable[Part] = PARTS,
    device: torch.device | str | None = None,
) -> OffloadReport:
    """Move a model's tensors to host memory (pinned where the device can use it) and free the device's.

    Until :func:`onload` a forward or an optimizer's step that needs them raises.  Call it between steps: gathered
    parameters are dropped first.  Tensors that are elsewhere already, as by FSDP2's own CPU offload, stay.

    Args:
        model: plain or parallelized.
        optimizer: whose state to move; needed for the part ``"optimizer"``.
        parts: which of ``"parameters"``, ``"gradients"``, ``"buffers"`` and ``"optimizer"``.
        device: whose memory to free; by default where the model computes.  The CPU itself is left alone unless it
            is named: its bytes would only move within the same memory.

    Returns:
        The bytes that were freed, by part, and the device's allocation before and after.

    Raises:
        OptionError: an unknown part, or ``"optimizer"`` alone without one.
        ModelError: called inside ``unsharded``.
        OffloadError: the device did not get the bytes back, or a tensor's memory is not its own to free.
    """
    wanted = _require_parts(parts, optimizer)
    target = torch.device(device) if device is not None else compute_device(state_entries(model))
    if target.type == "cpu" and device is None:
        logger.info("the model is on the CPU: nothing to offload")
        return OffloadReport(dict.fromkeys(wanted, 0), None, None)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if is_held(module):
                raise ModelError("parameters are held gathered by unsharded(model): leave it before offload(model)")
            module.reshard()
    state = runtime_state(model)
    state.offloaded = offloaded = state.offloaded or _Offloaded(target)
    before = _allocated(target)
    moved: dict[Part, int] = {}
    for part in wanted:
        pairs = [(storage, _to_host(storage)) for storage in _storages(part, model, optimizer, target)]
        _synchronize(target)
        for storage, _ in pairs:
            storage.resize_(0)
        offloaded.storages.setdefault(part, []).extend(pairs)
        moved[part] = sum(host.nbytes for _, host in pairs)
    _guard(offloaded, model, optimizer)
    report = OffloadReport(moved, before, _allocated(target))
    if before is not None and before - (report.allocated_after or 0) < report.total:
        raise OffloadError(
            f"offload moved {report.total:,} bytes off {target}, but its allocation fell only from {before:,} to "
            f"{report.allocated_after:,} bytes: something allocated meanwhile, as another thread or a hook"
        )
    logger.info("offloaded %d bytes: %s", report.total, moved)
    return report


def onload(model: nn.Module, *, parts: Iterable[Part] = PARTS) -> OffloadReport:
    """Bring back what :func:`offload` moved; parts that are on the device already stay.

    Args:
        model: the model.
        parts: which parts, as ``("parameters", "buffers")`` for log-probabilities before the next step.

    Returns:
        The bytes that came back, by part.

    Raises:
        OptionError: an unknown part.
    """
    wanted = _require_parts(parts, None)
    offloaded: _Offloaded | None = runtime_state(model).offloaded
    if offloaded is None:
        return OffloadReport(dict.fromkeys(wanted, 0), None, None)
    before = _allocated(offloaded.device)
    moved: dict[Part, int] = {}
    for part in wanted:
        pairs = offloaded.storages.pop(part, [])
        for storage, host in pairs:
            storage.resize_(host.nbytes)
            storage.copy_(host.untyped_storage(), non_blocking=True)
        _synchronize(offloaded.device)
        moved[part] = sum(host.nbytes for _, host in pairs)
    if not offloaded.storages:
        for guard in offloaded.guards.values():
            guard.remove()
        runtime_state(model).offloaded = None
    return OffloadReport(moved, before, _allocated(offloaded.device))


def _require_parts(parts: Iterable[Part], optimizer: Optimizer | None) -> tuple[Part, ...]:
    wanted = tuple(parts)
    if unknown := [part for part in wanted if part not in PARTS]:
        raise OptionError(f"parts={wanted!r}: {unknown[0]!r} is none of {', '.join(map(repr, PARTS))}")
    if wanted == ("optimizer",) and optimizer is None:
        raise OptionError("parts=('optimizer',) without an optimizer: pass it as the second argument")
    return wanted


def _storages(
    part: Part, model: nn.Module, optimizer: Optimizer | None, device: torch.device
) -> Iterator[UntypedStorage]:
    """Each storage of a part once, as far as it is on the device and not empty."""
    seen: set[int] = set()
    for name, tensor in _tensors(part, model, optimizer):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.device.type != device.type or not storage.nbytes() or storage.data_ptr() in seen:
            continue
        if not storage.resizable():
            raise OffloadError(f"{name}: its memory belongs to a file or another process: replace it by its clone()")
        seen.add(storage.data_ptr())
        yield storage


def _tensors(part: Part, model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    parameters = [
        (entry.names[0], entry.tensor) for entry in state_entries(model) if isinstance(entry.tensor, nn.Parameter)
    ]
    match part:
        case "parameters":
            yield from parameters
        case "gradients":
            yield from ((name, p.grad) for name, p in parameters if p.grad is not None)
        case "buffers":
            yield from model.named_buffers()
        case "optimizer":
            for leaf in leaves(optimizer.state) if optimizer is not None else ():
                if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                    yield "optimizer state", leaf


def _to_host(storage: UntypedStorage) -> Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    host.untyped_storage().copy_(storage, non_blocking=True)
    return host


#: What a forward and an optimizer's step touch.
_FORWARD: tuple[Part, ...] = ("parameters", "buffers")
_STEP: tuple[Part, ...] = ("parameters", "gradients", "optimizer")


def _guard(offloaded: _Offloaded, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raise where freed memory would be used."""

    def refuse(needed: tuple[Part, ...]) -> None:
        if missing := [part for part in offloaded.storages if part in needed]:
            raise ModelError(
                f"{', '.join(missing)} are offloaded to host memory: call onload(model, parts={tuple(missing)!r}) first"
            )

    if id(model) not in offloaded.guards:
        offloaded.guards[id(model)] = model.register_forward_pre_hook(lambda *_: refuse(_FORWARD))
    if optimizer is not None and id(optimizer) not in offloaded.guards:
        offloaded.guards[id(optimizer)] = optimizer.register_step_pre_hook(lambda *_: refuse(_STEP))


def _allocated(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_allocated(device)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
