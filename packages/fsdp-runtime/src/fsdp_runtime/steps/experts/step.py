"""Expert parallelism: stacked experts divided over ``ep``, and tokens sent to them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from fsdp_runtime._peft_compat import BASE, base_model, lora_layers
from fsdp_runtime.errors import OptionError
from tp_plans import Plan
from tp_plans.runtime import TokenExchange, expert_styles_by_path

if TYPE_CHECKING:
    from fsdp_runtime.parallelism import Parallelism

logger = logging.getLogger(__name__)

#: How tokens travel: the name of an exchange, or a subclass of ``tp_plans.runtime.TokenExchange``.
ExpertExchange = str | type[TokenExchange]


def check_adapted_experts(model: nn.Module, plan: Plan, tp_plan: Plan | None, *, tp: int) -> None:
    """Check adapters on stacked experts.

    Args:
        model: the model.
        plan: the rules of the axis ``ep``.
        tp_plan: the plan of the axis ``tp`` before experts were dispatched, if there is one.
        tp: size of the axis ``tp``, whose ranks have the same tokens.

    Raises:
        OptionError: adapters of a dispatched module cannot be divided.
    """
    styles = {id(module): plan[plan.match(path)[0]] for path, module in expert_modules(model, plan).items()}
    for layer in lora_layers(base_model(model)):
        wrapper: Any = layer.module
        if (style := styles.get(id(wrapper.get_base_layer()))) is None:
            continue
        if layer.experts is None or not layer.plain:
            raise OptionError(
                f"{layer.path} adapts stacked experts with adapters that are merged, or not plain LoRA on a stacked "
                "weight [experts, ..., ...]: unmerge them, or leave the parameter out of target_parameters"
            )
        factor = f"{BASE}.{layer.path}.lora_A.{next(iter(layer.scaling), 'default')}"
        summed = tp == 1 or (tp_plan is not None and tp_plan.match(factor))
        if not summed or getattr(style, "identity_indices", False):
            raise OptionError(
                f"{layer.path} adapts stacked experts, which needs a rule for them on the axis tp, and weights that "
                "have one row for each expert: use tp=1, or leave the experts out of target_parameters"
            )


def expert_modules(model: nn.Module, plan: Plan | None) -> dict[str, nn.Module]:
    """Return the modules whose tokens a plan dispatches, by path."""
    if plan is None:
        return {}
    return {path: module for path, module in model.named_modules() if plan.match(path)}


def apply_ep(model: nn.Module, parallelism: Parallelism) -> None:
    """Divide stacked experts over ``ep`` and send tokens to them, in place; the third of the seven steps.

    Parameters that hold values on every rank are taken from the first rank of the axis, as in torch.

    Args:
        model: the model, already sharded over ``tp`` if that is asked for.
        parallelism: from :func:`fsdp_runtime.resolve_parallelism`; its ``ep_mesh`` is ``None`` where experts are not
            dispatched, and then nothing changes.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import MeshSpec, apply_ep, resolve_parallelism
        >>> model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]))
        >>> apply_ep(model, resolve_parallelism(model, MeshSpec().build(device_type="cpu")))  # no axis ep
    """
    if parallelism.expert_plan is None or parallelism.ep_mesh is None:
        return
    styles = expert_styles_by_path(
        parallelism.expert_plan, model, shared_mesh=parallelism.shared_mesh, exchange=parallelism.expert_exchange
    )
    parallelize_module(model, parallelism.ep_mesh, dict(styles))
    logger.info("expert parallelism: %d modules over %d ranks", len(styles), parallelism.ep_mesh.size())
