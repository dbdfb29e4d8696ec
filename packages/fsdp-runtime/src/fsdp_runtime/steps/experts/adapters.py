"""Low-rank adapters (peft) on stacked experts: a rank adds to its experts' weights the products of their factors.

peft stores the factors of all experts in two matrices, ``[experts * rank, in]`` and ``[out, rank * experts]``, the
experts of the second matrix innermost, and replaces the experts' weight by another parameter while they run.  This is
impossible for a weight that is sharded over ``ep`` or ``tp`` or gathered by FSDP2.  Here the factors stay
parameters of the block, sharded by FSDP2, and the experts' forward adds the products for the experts of its rank.  A
rank computes the factors' gradient of its experts: the sum over all ranks is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._peft_compat import LoraLayer, active_factors, is_out_first
from fsdp_runtime._torch_compat import own_parameters
from fsdp_runtime.steps.quantized.compute import current_rebuilt
from fsdp_runtime.wrap import Wrapper, wrap
from tp_plans.layouts import shard_ranges
from tp_plans.runtime import attach_zero_grads, full_view

_WRAPPERS = "_fsdp_runtime_adapters"


def adapt_experts(adapters: Iterable[LoraLayer]) -> None:
    """Let stacked experts add their adapters; call it before the experts are sharded."""
    for layer in adapters:
        if layer.experts is None:
            continue
        for mixin, module in ((_Wrapper, layer.module), (_Experts, layer.experts)):
            if not isinstance(module, mixin):
                wrap([module], mixin)


class _Wrapper(Wrapper):
    """Around peft's wrapper of a parameter: passes the wrapper to its experts for their forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        wrapper = cast(Any, self)
        wrappers = wrapper.get_base_layer().__dict__.setdefault(_WRAPPERS, [])
        wrappers.append(wrapper)
        try:
            return wrapper.base_layer(*args, **kwargs)
        finally:
            wrappers.pop()


class _Experts(Wrapper):
    """Around stacked experts, below the style that swaps in the weights of a rank's experts."""

    effect = "adapters of experts"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = cast(nn.Module, self)
        parameters = own_parameters(module)
        before: dict[str, Any] = {}
        try:
            for wrapper in module.__dict__.get(_WRAPPERS, ()):
                name = wrapper.parameter_name
                before[name] = parameters[name]
                products = list(_products(module, wrapper, before[name]))
                parameters[name] = _sum(before[name], products)
                if not torch.compiler.is_compiling() and (rebuilt := current_rebuilt()) is not None:
                    rebuilt.derive(before[name], parameters[name], partial(_sum_of_part, products))
            adapted = [parameters[name] for name in before]
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            parameters.update(before)
        # Without tokens the output depends on no input, and in backward the other ranks would wait.
        return output if output.requires_grad else attach_zero_grads(output, [*adapted, *args, *kwargs.values()])


_Product = tuple[tuple[Tensor, Tensor], float]


def _sum(stack: Tensor, products: Iterable[_Product]) -> Tensor:
    for product, scaling in products:
        stack = stack.baddbmm(*product, alpha=scaling)
    return stack


def _sum_of_part(products: Iterable[_Product], stack: Tensor, experts: slice) -> Tensor:
    """Return the sum for a slice of the experts, as backward rebuilds it."""
    return _sum(stack, [((a[experts].detach(), b[experts].detach()), scaling) for (a, b), scaling in products])


def _products(module: nn.Module, wrapper: Any, weight: Tensor) -> Iterator[_Product]:
    """Yield the factors of each active adapter for this rank's experts; their product has the weight's shape."""
    experts: int = wrapper.num_experts
    local = range(experts)
    if weight.shape[0] != experts:
        mesh = cast(Any, module).tp_mesh
        local = shard_ranges(experts, mesh.size())[mesh.get_local_rank()]
    for factors in active_factors(wrapper):
        full_a, full_b = _full(factors.a), _full(factors.b)
        a = full_a.view(experts, -1, full_a.shape[-1])[local.start : local.stop].to(weight.dtype)
        b = full_b.view(full_b.shape[0], -1, experts)[..., local.start : local.stop].permute(2, 0, 1).to(weight.dtype)
        yield ((b, a) if is_out_first(wrapper) else (a.transpose(1, 2), b.transpose(1, 2))), factors.scaling


def _full(factor: Tensor) -> Tensor:
    """Return a replicated factor as a plain tensor; each rank computes a partial sum of its gradient."""
    return full_view(factor, partial=True) if isinstance(factor, DTensor) else factor
