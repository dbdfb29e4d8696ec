"""Move a model from the meta device to a real one, in place, and refuse its forward until then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import (
    offloads_to_cpu,
    parameter_hooks,
    persistent_buffers,
    set_parameter_hooks,
    tree_leaves,
)
from fsdp_runtime._transformers_compat.models import original_class
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.mesh.spec import default_device_type
from fsdp_runtime.model.buffers import compute_meta_buffers
from fsdp_runtime.model.stages import recorded_meshes
from fsdp_runtime.model.state import StateEntry, state_entries
from fsdp_runtime.runtime_state import RUNTIME_STATE, runtime_state
from fsdp_runtime.wrap import hook_forward

_EFFECT = "refuses a forward until its parameters have data"
_FIX = (
    "load_weights(model, checkpoint) loads them, with new_modules={path: std} for a head that the checkpoint lacks; "
    "materialize(model) allocates them for initial values of your own"
)
#: Parameters that an error lists.
_LISTED = 4


def materialize(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Allocate every tensor of the model that is on the meta device on ``device``, in place; return the model.

    Parameters keep their identity, so ties and references in optimizers stay valid, and keep their placements and
    FSDP2 state; their values are undefined until weights are loaded.  Non-persistent buffers get the values of a model
    built on a real device.  Tensors that are not on meta keep their values and move to ``device``.

    Args:
        model: before or after ``parallelize``.
        device: by default the current device of the mesh's type; for a model without a mesh the device of its real
            tensors, else the CPU.  Without ``device`` a model with nothing on meta does not move.  Parameters that
            FSDP2 offloads are always allocated on the CPU.

    Raises:
        MetaBufferError: a non-persistent buffer is on meta and no module computes it; nothing has changed then.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime import materialize
        >>> with torch.device("meta"):
        ...     layer = nn.Linear(4, 2)
        >>> materialize(layer, "cpu").weight.device
        device(type='cpu')
    """
    with torch.inference_mode(False):
        materialize_entries(model, state_entries(model), device)
    return model


def materialize_entries(
    model: nn.Module, entries: Sequence[StateEntry], device: torch.device | str | None = None
) -> None:
    """Materialize a model, given its state entries; the buffers of entries may be replaced."""
    tensors = (*(entry.tensor for entry in entries), *model.buffers())
    if device is None and not any(tensor.is_meta for tensor in tensors):
        return
    target = require_device(device) if device is not None else compute_device(model, entries)
    compute_meta_buffers(model)
    parameter_device = torch.device("cpu") if offloads_to_cpu(model) else target
    for entry in entries:
        if isinstance(entry.tensor, nn.Parameter) and entry.tensor.is_meta:
            materialize_parameter(entry.tensor, parameter_device)
    for module in model.modules():
        for name, buffer in persistent_buffers(module).items():
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=target))
    model.to(parameter_device)  # FSDP2 documents this call as the point at which it adopts new storage
    if parameter_device != target:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(target))
    allow_loaded(model)


def require_device(device: torch.device | str) -> torch.device:
    """Return a device that a user named, such as ``"cuda:1"``."""
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"device={device!r} is not the name of a device, such as 'cpu' or 'cuda:1'") from error
    usable = {"cpu", default_device_type()}
    if target.type not in usable:
        raise OptionError(f"device={str(device)!r}: this machine has {' and '.join(sorted(usable))}")
    return target


def compute_device(model: nn.Module, entries: Sequence[StateEntry]) -> torch.device:
    """Return the device a model computes on: the mesh's current device, or the parameters' device without one."""
    mesh = next(recorded_meshes(model), None)
    plain = torch.device("cpu") if mesh is None else _current_device(mesh)
    for entry in entries:
        if isinstance(entry.tensor, DTensor):
            return _current_device(entry.tensor.device_mesh)
        if not entry.tensor.is_meta:
            plain = entry.tensor.device
    return plain


def _current_device(mesh: DeviceMesh) -> torch.device:
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def materialize_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    """Give one parameter that is on the meta device storage on ``device``, in place; its values are undefined."""
    real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)  # swap_tensors exchanges attributes too
    hooks = parameter_hooks(parameter)
    torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
    set_parameter_hooks(parameter, hooks)


def refuse_until_loaded(model: nn.Module, blocks: Iterable[str]) -> None:
    """Let a model with parameters on meta, and its submodules that contain blocks, refuse a forward."""
    # torch computes on meta tensors without an error under tensor parallelism, and FSDP2 fails with an unusable state.
    # The hooks remove themselves once all parameters have data, so later forwards do not run them.
    inside = tuple(blocks)
    for path, module in model.named_modules():
        owns_blocks = any(block.startswith(f"{path}.") for block in inside)
        if path and (not owns_blocks or isinstance(module, nn.ModuleList | nn.ModuleDict)):
            continue
        if any(parameter.is_meta for parameter in module.parameters()):
            runtime_state(module).unloaded = hook_forward(module, _EFFECT, before=_refuse, first=True)


def allow_loaded(model: nn.Module) -> None:
    """Remove the hooks of modules once all their parameters have data."""
    for module in model.modules():
        state = module.__dict__.get(RUNTIME_STATE)
        if state is not None and state.unloaded is not None and not _on_meta(module):
            state.unloaded.remove()
            state.unloaded = None


def require_loaded(names: Sequence[str], caller: str) -> None:
    """Raise :class:`ModelError` if there are parameters on the meta device."""
    if names:
        listed = ", ".join(names[:_LISTED]) + ", ..." * (len(names) > _LISTED)
        raise ModelError(f"{caller} with {len(names)} parameters on the meta device ({listed}): {_FIX}")


def _on_meta(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.is_meta]


def _refuse(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise for parameters on meta.  Without FSDP2 a forward on meta inputs is allowed: it computes shapes."""
    names = _on_meta(module)
    if not names:
        allow_loaded(module)
        return
    computes_shapes = all(leaf.is_meta for leaf in tree_leaves((args, {**kwargs})) if isinstance(leaf, Tensor))
    if not computes_shapes or any(isinstance(child, FSDPModule) for child in module.modules()):
        require_loaded(names, f"a forward of a {original_class(module).__name__}")
