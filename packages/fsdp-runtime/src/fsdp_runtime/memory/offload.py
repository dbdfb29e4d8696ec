"""Offload between phases: move parameters, gradients, buffers and optimizer state to host memory and back.

Tensors keep their identity: their storages are emptied and later filled again, so DTensors, FSDP2's views of its
shards, tied weights and the optimizer's references stay valid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_runtime._torch_compat import tree_leaves
from fsdp_runtime.errors import ModelError, OffloadError, OptionError
from fsdp_runtime.memory.unshard import is_held
from fsdp_runtime.model.materialize import compute_device, require_device
from fsdp_runtime.model.state import is_freed, state_entries
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.wrap import hook_forward

logger = logging.getLogger(__name__)

Part = Literal["parameters", "gradients", "buffers", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class OffloadReport:
    """The bytes that one call of :func:`offload` or :func:`onload` moved on this rank."""

    bytes_moved: Mapping[Part, int]  # bytes by part; a storage that several parts share is counted in the first part
    # bytes allocated on the device before the call; ``None`` on CPU, where allocation is not tracked
    allocated_before: int | None
    allocated_after: int | None  # bytes allocated on the device after the call

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.bytes_moved.values())


@dataclass
class _Offloaded:
    """A model's storages in host memory, by part, and the hooks that refuse their use."""

    device: torch.device
    storages: dict[Part, list[tuple[UntypedStorage, Tensor]]] = field(default_factory=dict)
    guards: list[Callable[[], None]] = field(default_factory=list)  # remove the hooks


def offload(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    parts: Iterable[Part] = PARTS,
    device: torch.device | str | None = None,
) -> OffloadReport:
    """Move a model's tensors to host memory (pinned for CUDA) and free the device memory.

    Until :func:`onload`, a forward or an optimizer step that needs the tensors raises.  Call it between steps: gathered
    parameters are freed first.  Tensors on another device, such as FSDP2's shards on the CPU, do not move.

    Args:
        model: a plain or parallelized model.
        optimizer: its state moves; needed for the part ``"optimizer"``.
        parts: some of ``"parameters"``, ``"gradients"``, ``"buffers"`` and ``"optimizer"``.
        device: the device to free; by default the model's compute device.  The CPU is freed only if it is named:
            the bytes would only move within host memory.

    Returns:
        The bytes that were freed, by part, and the device's allocation before and after.

    Raises:
        OptionError: an unknown part, only ``"optimizer"`` without an optimizer, or an unknown device.
        ModelError: called inside ``unsharded``.
        OffloadError: the device did not get the bytes back, or a tensor does not own its memory.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import offload, onload
        >>> model = nn.Linear(4, 4)
        >>> offload(model, device="cpu").bytes_moved["parameters"]  # 20 float32 numbers
        80
        >>> onload(model).total
        80
    """
    selected = _require_parts(parts)
    if selected == ("optimizer",) and optimizer is None:
        raise OptionError("parts=('optimizer',) without an optimizer: pass it as the second argument")
    if device is not None:
        target = require_device(device)
    elif (target := compute_device(model, state_entries(model, allow_offloaded=True))).type == "cpu":
        logger.info("the model is on the CPU: nothing to offload")
        return OffloadReport(dict.fromkeys(selected, 0), None, None)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if is_held(module):
                raise ModelError("parameters are held gathered by unsharded(model): leave it before offload(model)")
            module.reshard()
    state = runtime_state(model)
    state.offloaded = offloaded = state.offloaded or _Offloaded(target)
    before = _allocated(target)
    moved: dict[Part, int] = {}
    for part in selected:
        pairs = [(storage, _to_host(storage)) for storage in _storages(part, model, optimizer, target)]
        _synchronize(target)
        for storage, _ in pairs:
            storage.resize_(0)
        offloaded.storages.setdefault(part, []).extend(pairs)
        moved[part] = sum(host.nbytes for _, host in pairs)
    _guard(offloaded, model)
    report = OffloadReport(moved, before, _allocated(target))
    if before is not None and before - (report.allocated_after or 0) < report.total:
        raise OffloadError(
            f"offload moved {report.total:,} bytes off {target}, but its allocation fell only from {before:,} to "
            f"{report.allocated_after:,} bytes: another thread or a hook allocated memory meanwhile"
        )
    logger.info("offloaded %d bytes: %s", report.total, moved)
    return report


def onload(model: nn.Module, *, parts: Iterable[Part] = PARTS) -> OffloadReport:
    """Move back the tensors that :func:`offload` moved; parts that are on the device do not change.

    Args:
        model: the model.
        parts: the parts to move, such as ``("parameters", "buffers")`` for log-probabilities before the next step.

    Returns:
        The bytes that moved, by part.

    Raises:
        OptionError: an unknown part.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import offload, onload
        >>> model = nn.Linear(4, 4)
        >>> _ = offload(model, device="cpu")
        >>> onload(model, parts=("parameters", "buffers")).bytes_moved
        {'parameters': 80, 'buffers': 0}
    """
    selected = _require_parts(parts)
    offloaded: _Offloaded | None = runtime_state(model).offloaded
    if offloaded is None:
        return OffloadReport(dict.fromkeys(selected, 0), None, None)
    before = _allocated(offloaded.device)
    moved: dict[Part, int] = {}
    for part in selected:
        pairs = offloaded.storages.pop(part, [])
        for storage, host in pairs:
            storage.resize_(host.nbytes)
            storage.copy_(host.untyped_storage(), non_blocking=True)
        _synchronize(offloaded.device)
        moved[part] = sum(host.nbytes for _, host in pairs)
    if not offloaded.storages:
        for remove in offloaded.guards:
            remove()
        runtime_state(model).offloaded = None
    return OffloadReport(moved, before, _allocated(offloaded.device))


def _require_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    selected = tuple(parts)
    if unknown := [part for part in selected if part not in PARTS]:
        raise OptionError(f"parts={selected!r}: {unknown[0]!r} is not one of {', '.join(map(repr, PARTS))}")
    return selected


def _storages(
    part: Part, model: nn.Module, optimizer: Optimizer | None, device: torch.device
) -> Iterator[UntypedStorage]:
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
    entries = state_entries(model, allow_offloaded=True)
    parameters = [(entry.names[0], entry.tensor) for entry in entries if isinstance(entry.tensor, nn.Parameter)]
    match part:
        case "parameters":
            yield from parameters
        case "gradients":
            yield from ((name, p.grad) for name, p in parameters if p.grad is not None)
        case "buffers":
            yield from model.named_buffers()
        case "optimizer":
            for leaf in tree_leaves(optimizer.state) if optimizer is not None else ():
                if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                    yield "optimizer state", leaf


def _to_host(storage: UntypedStorage) -> Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    host.untyped_storage().copy_(storage, non_blocking=True)
    return host


#: The parts that a forward reads.
_FORWARD: tuple[Part, ...] = ("parameters", "buffers")


def _guard(offloaded: _Offloaded, model: nn.Module) -> None:
    """Make every use of the freed memory raise: forwards, state dicts, copies, gathers and optimizer steps."""
    # These hooks run before FSDP2's hooks, which gather parameters. CPU operators do not check a storage's size, so an
    # unguarded use would end the process.
    if offloaded.guards:
        return

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        missing = tuple(part for part in offloaded.storages if part in _FORWARD) or tuple(offloaded.storages)
        raise ModelError(
            f"{', '.join(missing)} are offloaded to host memory: call onload(model, parts={missing!r}) first"
        )

    def refuse_forward(*_args: Any) -> None:
        if any(part in _FORWARD for part in offloaded.storages):
            refuse()

    for module in model.modules():
        offloaded.guards += [
            hook_forward(module, "refuses to run while offloaded", before=refuse_forward, first=True).remove,
            module.register_state_dict_pre_hook(refuse_forward).remove,  # type: ignore[no-untyped-call]
        ]
        names = ("__deepcopy__", "__reduce_ex__", *(("unshard",) if isinstance(module, FSDPModule) else ()))
        offloaded.guards += [partial(_restore, module, name, module.__dict__.get(name)) for name in names]
        module.__dict__.update(dict.fromkeys(names, refuse))
    offloaded.guards.append(register_optimizer_step_pre_hook(_refuse_freed).remove)


def _refuse_freed(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [leaf for leaf in tree_leaves(optimizer.state) if isinstance(leaf, Tensor)]
    needed = {"parameters": parameters, "gradients": gradients, "optimizer": state}
    if missing := tuple(part for part, tensors in needed.items() if any(map(is_freed, tensors))):
        raise ModelError(
            f"{', '.join(missing)} are offloaded to host memory: call onload(model, parts={missing!r}) before a "
            f"step of this {type(optimizer).__name__}"
        )


def _restore(module: nn.Module, name: str, replaced: Any) -> None:
    module.__dict__.pop(name, None)
    if replaced is not None:
        module.__dict__[name] = replaced


def _allocated(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_allocated(device)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
