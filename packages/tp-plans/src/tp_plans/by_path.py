"""Plans as torch styles for one model, by the paths of its modules in place of patterns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tp_plans.model_tree import ModelTree
from tp_plans.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from tp_plans.torch_styles import TokenExchange


def styles_by_path(plan: Plan, model: Any) -> dict[str, ParallelStyle]:
    """Return the torch styles of a plan for one model, keyed by module path (imports torch).

    :meth:`Plan.to_torch` is keyed by pattern.  This function names each module that a rule matches.  As a result,
    ``parallelize_module`` does not warn of layers without a match, and rules for one module at different
    patterns are distinguished from rules for different modules.

    Args:
        plan: the plan.
        model: the ``torch.nn.Module`` that it is for; the meta device is enough.

    Returns:
        ``{module path: ParallelStyle}``; rules of bare parameters are folded onto the module that owns them.

    Example:
        >>> import torch, tp_plans
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
        >>> plan = tp_plans.Plan({"0": tp_plans.ColwiseParallel(), "1": tp_plans.RowwiseParallel()})
        >>> sorted(tp_plans.styles_by_path(plan, model))
        ['0', '1']
    """
    from tp_plans.torch_styles import to_torch

    tree = ModelTree.of(model)
    places = (*tree.modules, *tree.parameters)
    return to_torch({path: plan[matched[0]] for path in places if (matched := plan.match(path))})


def expert_styles_by_path(
    plan: Plan,
    model: Any,
    *,
    shared_mesh: DeviceMesh | None = None,
    exchange: str | type[TokenExchange] = "all_to_all",
) -> dict[str, ParallelStyle]:
    """Return the torch styles of a plan's axis ``ep`` for one model, keyed by module path (imports torch).

    Apply them with ``parallelize_module(model, mesh["ep"], styles)``, after the styles of the axis ``tp``.

    Args:
        plan: the plan; rules of the axis ``tp`` are passed over.
        model: the ``torch.nn.Module`` that it is for; the meta device is enough.
        shared_mesh: ``tp``, if its ranks have the same tokens: they divide the tokens among themselves before they
            send them; ``None`` if every rank has different tokens.
        exchange: how tokens travel: ``"all_to_all"``, or a subclass of ``TokenExchange``.

    Returns:
        ``{module path: ParallelStyle}``.

    Raises:
        CapabilityError: the kernels of the exchange are not installed.
        PlanError: the exchange is unknown, or an argument is of another type.

    Example:
        >>> import torch, tp_plans
        >>> plan = tp_plans.Plan({"experts": tp_plans.DispatchExperts()})
        >>> sorted(tp_plans.runtime.expert_styles_by_path(plan, torch.nn.ModuleDict({"experts": torch.nn.Identity()})))
        ['experts']
    """
    from tp_plans.torch_styles import dispatch_styles

    rules = {path: plan[matched[0]] for path in ModelTree.of(model).modules if (matched := plan.match(path))}
    return dispatch_styles(rules, shared_mesh=shared_mesh, exchange=exchange)
