"""Collectives, DTensors and autograd functions without the host time of torch's public calls.

All of it is private, and the same in all versions from 2.11 to 2.15.

* Functional collectives as the operators that DTensor calls: selective checkpointing saves their results by name, and
  dry runs count them.  Python functions and autograd formulas around the operators take five times as long.
* DTensors from their parts, without history in autograd, and without the checks of ``DTensor.from_local``, as in FSDP2.
* Autograd functions without the checks of ``Function.apply``, which take as long as the function.  Transforms of
  ``torch.func`` still get the checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

_ops = torch.ops._c10d_functional
_wait: Callable[..., Any] = _ops.wait_tensor.default
_all_reduce: Callable[..., Any] = _ops.all_reduce.default
_all_gather: Callable[..., Any] = _ops.all_gather_into_tensor.default
_reduce_scatter: Callable[..., Any] = _ops.reduce_scatter_tensor.default
_without_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd


def all_reduced(tensor: Tensor, group: str) -> Tensor:
    """Return the sum over the ranks of a process group, given by name; the tensor stays as it is."""
    tensor = tensor.contiguous()
    with _without_autograd():
        summed: Tensor = _wait(_all_reduce(tensor, "sum", group))
    return summed


def gathered(rows: Tensor, group: str, ranks: int) -> Tensor:
    """Return the ranks' rows ``[rows, ...]``, of equal number, one after another."""
    with _without_autograd():
        full: Tensor = _wait(_all_gather(rows, ranks, group))
    return full


def reduce_scattered(rows: Tensor, group: str, ranks: int) -> Tensor:
    """Return this rank's part of the sum over the ranks; the first dim is a multiple of their number."""
    with _without_autograd():
        own: Tensor = _wait(_reduce_scatter(rows, "sum", ranks, group))
    return own


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
    """Return a DTensor's local tensor without autograd history; nothing may be written to it."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> Any:
    """Return the mesh, placements, shape and strides of a DTensor."""
    return tensor._spec


def with_spec(local: Tensor, spec: Any) -> DTensor:
    """Return a DTensor over this rank's part of it, like the one that a spec is of."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)  # DTensor.__init__ does nothing


_transforms_active = torch._C._are_functorch_transforms_active


def direct(function: type[Function]) -> Callable[..., Any]:
    """Return the callable that applies a function in eager code; the compiler traces ``function.apply``."""
    apply = super(Function, function).apply  # type: ignore[misc]

    def applied(*args: Any) -> Any:
        return function.apply(*args) if _transforms_active() else apply(*args)  # type: ignore[no-untyped-call]

    return applied
