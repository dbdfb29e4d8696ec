"""DTensors made from their parts, without the checks and autograd functions of ``DTensor.from_local``.

The constructor and ``DTensorSpec`` are private, and the same in all versions from 2.10 to 2.15; FSDP2 makes its
parameters in the same way.  What is made has no history in autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

#: Specs by the identity of their mesh, which they keep alive, and by placement, shape and dtype.
_specs: dict[tuple[int, Placement, torch.Size, torch.dtype], DTensorSpec] = {}


def make_dtensor(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size) -> DTensor:
    """Return a contiguous DTensor of a shape over this rank's part of it."""
    return with_spec(local, make_spec(mesh, placement, shape, local.dtype))


def make_spec(mesh: DeviceMesh, placement: Placement, shape: torch.Size, dtype: torch.dtype) -> Any:
    """Return the spec of a contiguous DTensor."""
    key = (id(mesh), placement, shape, dtype)
    spec = _specs.get(key)
    if spec is None:
        if len(_specs) >= 4096:  # batches of ever new lengths
            _specs.clear()
        stride, width = [1] * len(shape), 1
        for dim in range(len(shape) - 1, 0, -1):
            width *= max(shape[dim], 1)
            stride[dim - 1] = width
        meta = TensorMeta(shape, tuple(stride), dtype)
        spec = _specs[key] = DTensorSpec(mesh, (placement,), tensor_meta=meta)
    return spec


def local_of(tensor: DTensor) -> Tensor:
    """Return the tensor that a DTensor is over, without a history of its own; nothing may be written to it."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> Any:
    """Return the mesh, placements, shape and strides of a DTensor."""
    return tensor._spec


def with_spec(local: Tensor, spec: Any) -> DTensor:
    """Return a DTensor over this rank's part of it, like the one that a spec is of."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)  # whose __init__ does nothing
