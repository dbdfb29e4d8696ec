"""Weights in packed bytes as exports see them: tensors with the dequantized values, computed where they are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from fsdp_runtime._torch_compat import wrapper_tensor, written_arguments
from fsdp_runtime.errors import ConversionError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.weights.quantize.packed import PackedWeight, packed_weight

_aten = torch.ops.aten


class DequantizedTensor(Tensor):
    """The values of a shard of packed bytes; an operator dequantizes the rows that it reads."""

    packed: Tensor
    weight: PackedWeight

    @staticmethod
    def __new__(cls, packed: Tensor, weight: PackedWeight) -> DequantizedTensor:
        """Create the wrapper subclass; tensors are created here, not in ``__init__``."""
        tensor: DequantizedTensor = wrapper_tensor(cls, weight.shape_of(packed.shape), weight.dtype, packed.device)
        tensor.packed, tensor.weight = packed.detach(), weight
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Keep shards of rows packed; run every other operator on the values, and none that writes."""
        kwargs, tensor = kwargs or {}, args[0] if args else None
        if any(isinstance(written, cls) for written in written_arguments(function, args, kwargs)):
            raise ConversionError(
                "packed bytes take no values of a transfer: send weights to a model without Quantized"
            )
        if isinstance(tensor, cls):
            if function in (_aten.detach.default, _aten.alias.default):
                return cls(tensor.packed, tensor.weight)
            if function is _aten.view.default and list(args[1]) == list(tensor.shape):
                return cls(tensor.packed, tensor.weight)
            if function is _aten.slice.Tensor and (dim := tensor.weight.place(args[1] % tensor.ndim)) < tensor.ndim - 1:
                return cls(function(tensor.packed, dim, *args[2:], **kwargs), tensor.weight)
        return function(*map(_values, args), **{name: _values(value) for name, value in kwargs.items()})


def _values(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_values(each) for each in value]
    return value.weight.dequantize(value.packed) if isinstance(value, DequantizedTensor) else value


def dequantized_entries(entries: Iterable[StateEntry]) -> list[StateEntry]:
    """Return state entries with the values of packed bytes in the shape, dtype and layout of the weights."""
    return [_dequantized(entry) for entry in entries]


def _dequantized(entry: StateEntry) -> StateEntry:
    weight, tensor = packed_weight(entry), entry.tensor
    if weight is None:
        return entry
    if not isinstance(tensor, DTensor):
        return replace(entry, tensor=DequantizedTensor(tensor, weight))
    stride = torch.empty(weight.shape, device="meta").stride()
    values = DTensor.from_local(
        DequantizedTensor(tensor.to_local(), weight),
        tensor.device_mesh,
        [_placed(placement, weight) for placement in tensor.placements],
        run_check=False,
        shape=torch.Size(weight.shape),
        stride=stride,
    )
    return replace(entry, tensor=values)


def _placed(placement: Placement, weight: PackedWeight) -> Placement:
    dim = getattr(placement, "dim", None)
    return placement if dim is None or weight.place(dim) == dim else Shard(weight.place(dim))
