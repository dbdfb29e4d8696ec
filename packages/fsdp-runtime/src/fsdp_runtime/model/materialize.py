"""From the meta device to a real one, in place."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import offloads_to_cpu, persistent_buffers
from fsdp_runtime.model.buffers import compute_meta_buffers
from fsdp_runtime.model.state import entries


def materialize(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Give every tensor of the model that is on the meta device storage on ``device``, in place.

    Parameters stay the objects that they are, so ties and references in optimizers hold, and keep their layout
    and FSDP2 state; their values are undefined until they are loaded.  Non-persistent buffers get the values that
    a model built on a real device has.  Tensors that are not on meta keep their values and move to ``device``.

    Args:
        model: before or after ``parallelize``.
        device: by default the current device of the mesh's type, for a plain model that of its real tensors, else
            the CPU; a model with nothing on meta then stays where it is.  Parameters that FSDP2 offloads go to the
            CPU in any case.

    Returns:
        The same model.

    Raises:
        MetaBufferError: a non-persistent buffer is on meta and nothing computes it; nothing has changed then.
    """
    if device is None and not _is_on_meta(model):
        return model
    compute_device = torch.device(device) if device is not None else home_device(model)
    compute_meta_buffers(model)
    parameter_device = torch.device("cpu") if offloads_to_cpu(model) else compute_device
    for entry in entries(model):
        if isinstance(entry.tensor, nn.Parameter) and entry.tensor.is_meta:
            materialize_parameter(entry.tensor, parameter_device)
    for module in model.modules():
        for name, buffer in persistent_buffers(module).items():
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=compute_device))
    model.to(parameter_device)  # the documented moment at which FSDP2 takes note of new storage
    if parameter_device != compute_device:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(compute_device))
    return model


def home_device(model: nn.Module) -> torch.device:
    """Where a model computes: the current device of its mesh's type, for a plain model that of its parameters."""
    plain = torch.device("cpu")
    for entry in entries(model):
        if isinstance(entry.tensor, DTensor):
            kind = entry.tensor.device_mesh.device_type
            return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
        if not entry.tensor.is_meta:
            plain = entry.tensor.device
    return plain


def _is_on_meta(model: nn.Module) -> bool:
    shards = (entry.tensor for entry in entries(model))
    return any(tensor.is_meta for tensor in (*shards, *model.buffers()))


def materialize_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    """Give one parameter that is on the meta device storage on ``device``, in place; its values are undefined."""
    real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)  # swapping takes attributes along
    torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
