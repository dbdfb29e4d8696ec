"""Products with weights in packed bytes: dequantized in forward and again in backward, and never kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fsdp_runtime._torch_compat import own_parameters, saved_tensor_hooks, storage_key, tree_leaves
from fsdp_runtime.errors import ModelError
from fsdp_runtime.weights.quantize.packed import PackedFormat, packed_weights
from fsdp_runtime.wrap import Wrapper


class QuantizedLinear(Wrapper):
    """A linear layer with a weight in packed bytes."""

    effect = "weight dequantized from packed bytes"

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the product with the dequantized weight, in the input's dtype."""
        module = cast(nn.Linear, self)
        entering = tensor.to(_compute_dtype(module, tensor))
        fmt = packed_weights(module)["weight"].format
        bias: Tensor | None = module.bias
        return cast(Tensor, _Linear.apply(entering, module.weight, bias, fmt.kind, fmt.block))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """``functional.linear`` that keeps the packed bytes only."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, packed: Tensor, bias: Tensor | None, kind: str, block: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.format = kind, block
        return functional.linear(tensor, PackedFormat(kind, block).dequantize(packed, tensor.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        (packed,) = ctx.saved_tensors
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = gradient @ PackedFormat(*ctx.format).dequantize(packed, gradient.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_input, None, of_bias, None, None


class QuantizedExperts(Wrapper):
    """Stacked experts with weights in packed bytes: their code reads the dequantized weights during its forward."""

    effect = "experts dequantized from packed bytes"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the experts' code on dequantized weights, in the tokens' dtype."""
        module = cast(nn.Module, self)
        parameters, weights = own_parameters(module), packed_weights(module)
        tokens = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        dtype = _compute_dtype(module, tokens)
        stored = {name: parameters[name] for name in weights}
        rebuilt = RebuiltTensors()
        try:
            for name, weight in weights.items():
                parameters[name] = weight.dequantize(stored[name], dtype)
                if not torch.compiler.is_compiling():
                    rebuilt.add(parameters[name], partial(_experts, weight.dequantize, stored[name], dtype))
            if torch.compiler.is_compiling():  # the compiler chooses the tensors that a graph keeps
                return super().forward(*args, **kwargs)  # type: ignore[misc]
            with rebuilding(rebuilt):
                return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            parameters.update(stored)


def _experts(dequantize: Callable[..., Tensor], packed: Tensor, dtype: torch.dtype, experts: slice) -> Tensor:
    return dequantize(packed[experts], dtype)


def _compute_dtype(module: nn.Module, tensor: Tensor) -> torch.dtype:
    """Return the dtype of a product: the input's, or autocast's."""
    if not tensor.is_floating_point():
        raise ModelError(
            f"a quantized {type(module).__name__} got an input of {tensor.dtype}: the model's code converts it to the "
            "dtype of the layer's weight; name the layer in Quantized(keep=...)"
        )
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


@dataclass(frozen=True)
class _Rebuilt:
    """A saved view of a stack of experts, without its values."""

    rebuild: Callable[[slice], Tensor]
    experts: slice
    offset: int  # of the view in the rebuilt experts
    shape: torch.Size
    stride: tuple[int, ...]


class RebuiltTensors:
    """Stacks of experts that autograd does not keep: backward rebuilds the experts that it reads."""

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[Tensor, Callable[..., Tensor]]] = {}

    def add(self, stack: Tensor, rebuild: Callable[..., Tensor]) -> None:
        """Add a stack ``[experts, ...]``; ``rebuild`` returns it for a slice of experts, in the same strides."""
        self._stacks[storage_key(stack)] = stack, rebuild

    def derive(self, stack: Tensor, derived: Tensor, rebuild: Callable[[Tensor, slice], Tensor]) -> None:
        """Add a stack that is computed from a known one; ``rebuild`` gets the known stack's experts."""
        if (known := self._stacks.get(storage_key(stack))) is not None and derived is not stack:
            _, rebuild_known = known
            self.add(derived, lambda experts: rebuild(rebuild_known(experts), experts))

    def clear(self) -> None:
        """Release the stacks: torch keeps the hooks of saved tensors, and so this object, until backward."""
        self._stacks.clear()

    def handle_of(self, tensor: Tensor) -> _Rebuilt | None:
        """Return the handle of a view of a stack; ``None`` for any other tensor."""
        known = self._stacks.get(storage_key(tensor)) if type(tensor) in (Tensor, nn.Parameter) else None
        if known is None or not tensor.numel():
            return None
        stack, rebuild = known
        size, offset = stack[0].numel(), int(tensor.storage_offset())
        last = offset + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        first = offset // size
        experts = slice(first, last // size + 1)
        return _Rebuilt(rebuild, experts, offset - first * size, tensor.shape, tensor.stride())


_current: ContextVar[RebuiltTensors | None] = ContextVar("rebuilt", default=None)


def current_rebuilt() -> RebuiltTensors | None:
    """Return the stacks that the running experts rebuild, ``None`` outside of quantized experts."""
    return _current.get()


@partial(torch.compiler.disable, recursive=False)  # the code of the experts is compiled
@contextmanager
def rebuilding(rebuilt: RebuiltTensors) -> Iterator[None]:
    """Let autograd keep handles of some stacks; other tensors go to the hooks that are active outside."""
    outer = saved_tensor_hooks()

    def pack(tensor: Tensor) -> Any:
        handle = rebuilt.handle_of(tensor)
        if handle is not None:
            return handle
        return tensor.detach() if outer is None else outer[0](tensor)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _Rebuilt):
            return saved.rebuild(saved.experts).as_strided(saved.shape, saved.stride, saved.offset)
        return saved if outer is None else outer[1](saved)

    token = _current.set(rebuilt)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _current.reset(token)
        rebuilt.clear()
