"""Plans as ``torch.distributed.tensor.parallel`` styles."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tp_plans.errors import PlanError, type_name
from tp_plans.styles import DispatchExperts, Style
from tp_plans.torch_styles.build import group_by_parent, style_to_torch
from tp_plans.torch_styles.dispatch.exchange import AllToAllExchange, DispatchedTokens, TokenExchange, exchange_class
from tp_plans.torch_styles.dispatch.style import DispatchExpertsImpl

__all__ = ["AllToAllExchange", "DispatchedTokens", "TokenExchange", "dispatch_styles", "exchange_class", "to_torch"]


def to_torch(plan: Mapping[str, Style]) -> dict[str, ParallelStyle]:
    """A plan as the dict that ``torch.distributed.tensor.parallel.parallelize_module`` takes."""
    # Equal rules share one style, and so the classes and compiled graphs of the modules that they match.
    made: dict[Hashable, ParallelStyle] = {}
    styles: dict[str, ParallelStyle] = {}
    for pattern, (style, owned) in group_by_parent(plan).items():
        key = (style, owned.key())
        if key not in made:
            made[key] = style_to_torch(style, owned)
        styles[pattern] = made[key]
    return styles


def dispatch_styles(
    rules: Mapping[str, Style],
    *,
    shared_mesh: DeviceMesh | None = None,
    exchange: str | type[TokenExchange] = "all_to_all",
) -> dict[str, ParallelStyle]:
    """Return the torch styles of the rules of the axis ``ep``.

    Apply them with ``parallelize_module(model, mesh["ep"], styles)``, after the styles of the axis ``tp``.

    Args:
        rules: module path to style, as of ``Plan.by_path``; rules of the axis ``tp`` are left out.
        shared_mesh: ``tp``, if its ranks have the same tokens: they divide the tokens among themselves before they
            send them; ``None`` if every rank has different tokens.
        exchange: how tokens travel: ``"all_to_all"``, or a subclass of ``TokenExchange``.

    Returns:
        ``{module path: ParallelStyle}``; equal rules share one style.

    Raises:
        PlanError: the exchange is unknown, or an argument is of another type.

    Example:
        >>> import tp_plans
        >>> sorted(tp_plans.runtime.dispatch_styles({"experts": tp_plans.DispatchExperts()}))
        ['experts']
    """
    if shared_mesh is not None and not isinstance(shared_mesh, DeviceMesh):
        raise PlanError(f"shared_mesh is of type {type_name(shared_mesh)}: give the axis as mesh['tp'], or None")
    chosen = exchange_class(exchange)
    made: dict[Style, ParallelStyle] = {}
    styles: dict[str, ParallelStyle] = {}
    for path, style in rules.items():
        if isinstance(style, DispatchExperts):
            if style not in made:
                made[style] = DispatchExpertsImpl(style, shared_mesh=shared_mesh, exchange=chosen)
            styles[path] = made[style]
    return styles
