"""Expert parallelism: stacked experts divided over ``ep``, tokens sent to them, and their low-rank adapters (peft).

peft stores the factors of all experts in two matrices, ``[experts * rank, in]`` and ``[out, rank * experts]``, the
experts of the second matrix innermost, and replaces the experts' weight by another parameter while they run.  This is
impossible for a weight that is sharded over ``ep`` or ``tp`` or gathered by FSDP2.  Here the factors stay
parameters of the block, sharded by FSDP2, and the experts' forward adds the products for the experts of its rank.  A
rank computes the factors' gradient of its experts: the sum over all ranks is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from fsdp_runtime._peft_compat import BASE, active_factors, is_out_first
from fsdp_runtime._torch_compat import own_parameters
from fsdp_runtime.errors import OptionError
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.quantized.compute import current_rebuilt
from fsdp_runtime.steps.refused_adapters import refuse_adapters
from fsdp_runtime.wrap import Wrapper, wrap
from tp_plans import Plan, with_expert_parallelism
from tp_plans.layouts import shard_ranges
from tp_plans.runtime import TokenExchange, attach_zero_grads, dispatch_styles, exchange_class, full_view

logger = logging.getLogger(__name__)

#: The exchange of tokens: its name, or a subclass of ``tp_plans.runtime.TokenExchange``.
ExpertExchange = str | type[TokenExchange]
_WRAPPERS = "_fsdp_runtime_adapters"


@dataclass(frozen=True)
class ExpertParallel(Step[None]):
    """Divide stacked experts over ``ep`` and send tokens to them.

    Parameters that hold values on every rank are taken from the first rank of the axis, as in torch.

    Args:
        exchange: the exchange of tokens between ranks: ``"all_to_all"``, or a subclass of
            ``tp_plans.runtime.TokenExchange``.
    """

    exchange: ExpertExchange = "all_to_all"

    def resolve(self, setup: Setup) -> Setup:
        """Add the rules of the axis ``ep`` to the plan, where the mesh has that axis."""
        if setup.meshes.ep is None:
            return setup
        exchange_class(self.exchange)
        before = setup.plan if isinstance(setup.plan, Plan) else None
        plan = with_expert_parallelism(before, setup.facts.model)
        return replace(setup, tp_plan=before, plan=plan, expert_plan=plan.on_axis("ep"))

    def check(self, setup: Setup) -> None:
        """Check adapters on stacked experts, by the rules of ``ep`` and the plan of ``tp`` before dispatch."""
        model, plan, tp_plan = setup.facts.model, setup.expert_plan, setup.tp_plan
        if plan is None:
            return
        styles = {id(module): plan[plan.match(path)[0]] for path, module in setup.expert_modules(model).items()}
        for layer in setup.facts.adapters:
            wrapper: Any = layer.module
            if (style := styles.get(id(wrapper.get_base_layer()))) is None:
                continue
            if layer.experts is None or layer.odd:
                refuse_adapters(layer.path, layer.odd or "on a layer")
            factor = f"{BASE}.{layer.path}.lora_A.{next(iter(layer.scaling), 'default')}"
            summed = setup.meshes.shared is None or (tp_plan is not None and tp_plan.match(factor))
            if not summed or getattr(style, "identity_indices", False):
                raise OptionError(
                    f"{layer.path} adapts stacked experts. Over tp this needs a rule for the factors, and weights with "
                    "one row for each expert: use tp=1, or leave the experts out of target_parameters"
                )

    def prepare(self, model: nn.Module, setup: Setup, checked: None) -> None:
        """Let stacked experts add their adapters, on every mesh: layers are sharded afterwards."""
        for layer in setup.facts.adapters:
            pairs = ((_Wrapper, layer.module), (_Experts, layer.experts)) if layer.experts is not None else ()
            for mixin, module in pairs:
                if not isinstance(module, mixin):
                    wrap([module], mixin)

    def apply(self, model: nn.Module, setup: Setup, checked: None) -> None:
        """Divide the experts; without dispatched experts nothing changes."""
        ep_mesh = setup.meshes.ep
        if setup.expert_plan is None or ep_mesh is None:
            return
        rules = setup.expert_plan.by_path(model)
        styles = dispatch_styles(rules, shared_mesh=setup.meshes.shared, exchange=self.exchange)
        parallelize_module(model, ep_mesh, dict(styles))
        logger.info("expert parallelism: %d modules over %d ranks", len(styles), ep_mesh.size())


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
