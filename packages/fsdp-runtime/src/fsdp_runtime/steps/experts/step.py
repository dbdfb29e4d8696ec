"""Expert parallelism: stacked experts divided over ``ep``, and tokens sent to them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from fsdp_runtime._peft_compat import BASE
from fsdp_runtime.errors import OptionError
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.experts.adapters import adapt_experts
from fsdp_runtime.steps.refused_adapters import refuse_adapters
from tp_plans import Plan, with_expert_parallelism
from tp_plans.runtime import TokenExchange, dispatch_styles, exchange_class

logger = logging.getLogger(__name__)

#: The exchange of tokens: its name, or a subclass of ``tp_plans.runtime.TokenExchange``.
ExpertExchange = str | type[TokenExchange]


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
        adapt_experts(setup.facts.adapters)

    def apply(self, model: nn.Module, setup: Setup, checked: None) -> None:
        """Divide the experts; without dispatched experts nothing changes."""
        ep_mesh = setup.meshes.ep
        if setup.expert_plan is None or ep_mesh is None:
            return
        rules = setup.expert_plan.by_path(model)
        styles = dispatch_styles(rules, shared_mesh=setup.meshes.shared, exchange=self.exchange)
        parallelize_module(model, ep_mesh, dict(styles))
        logger.info("expert parallelism: %d modules over %d ranks", len(styles), ep_mesh.size())
