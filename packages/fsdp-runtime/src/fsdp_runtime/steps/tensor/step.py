"""Tensor and sequence parallelism: a checked plan, applied with torch's ``parallelize_module``."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeGuard, get_args

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from fsdp_runtime.errors import OptionError
from fsdp_runtime.steps.experts.adapters import adapt_experts
from fsdp_runtime.steps.outputs.generation import gather_logits_in_generate
from fsdp_runtime.steps.outputs.hidden_states import return_full_hidden_states
from fsdp_runtime.steps.outputs.labels import gather_logits_for_labels
from tp_plans import ColwiseParallel, Plan, Replicate, Shard, Style, check, styles_by_path

if TYPE_CHECKING:
    from fsdp_runtime.parallelism import Parallelism

logger = logging.getLogger(__name__)

Logits = Literal["sharded", "full"]
Towers = Literal["sharded", "replicated"]


def require_logits(logits: object) -> None:
    """Check that ``logits`` is ``"sharded"`` or ``"full"``.

    Raises:
        OptionError: it is neither.
    """
    if logits not in get_args(Logits):
        raise OptionError(f"logits={logits!r}: write 'sharded' or 'full'")


def require_towers(towers: object) -> None:
    """Check that ``towers`` is ``"sharded"`` or ``"replicated"``.

    Raises:
        OptionError: it is neither.
    """
    if towers not in get_args(Towers):
        raise OptionError(f"towers={towers!r}: write 'sharded' or 'replicated'")


def with_logits(plan: Plan, logits: Logits) -> Plan:
    """Return the plan with logits sharded on the vocabulary, or gathered into a plain tensor on every rank."""
    if logits == "sharded":
        return plan
    heads: dict[str, Style | None] = {
        pattern: replace(style, output_layouts=Replicate(), use_local_output=True)
        for pattern, style in plan.items()
        if _has_sharded_logits(style)
    }
    return plan.override(heads)


def _has_sharded_logits(style: Style | None) -> TypeGuard[ColwiseParallel]:
    """Return True for a head; layers of blocks give plain features, or DTensors sharded on the rows or the sequence."""
    inside = (Shard(0), Shard(1))
    return isinstance(style, ColwiseParallel) and not style.use_local_output and style.output_layouts not in inside


def check_plan(model: nn.Module, plan: Plan, *, tp: int = 1, ep: int = 1) -> tuple[str, ...]:
    """Check a plan against a model and the sizes of ``tp`` and ``ep``; the model is not changed.

    Returns:
        The warnings, which are also logged.

    Raises:
        tp_plans.CheckFailedError: the plan does not fit; every finding is listed.
    """
    report = check(plan, model, tp=tp, ep=ep)
    report.raise_on_error()
    findings = tuple(map(str, report.findings))
    for finding in findings:
        logger.warning("%s", finding)
    return findings


def apply_tp(model: nn.Module, parallelism: Parallelism) -> None:
    """Shard the layers of a model over ``tp`` by the resolved plan, in place; the second of the seven steps.

    Parameters that hold values on every rank are taken from the first rank of the axis, as in torch.

    Args:
        model: the model.
        parallelism: from :func:`fsdp_runtime.resolve_parallelism`; its plan is ``None`` where layers stay replicated,
            and then nothing changes.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import MeshSpec, apply_tp, resolve_parallelism
        >>> model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]))
        >>> parallelism = resolve_parallelism(model, MeshSpec(tp=1).build(device_type="cpu"))
        >>> apply_tp(model, parallelism)  # one rank of tp: no layer is sharded
        >>> type(model[0][0][0].weight).__name__
        'Parameter'
    """
    adapt_experts(model)
    plan, tp_mesh = parallelism.plan, parallelism.tp_mesh
    if plan is not None and tp_mesh is not None:
        styles = styles_by_path(plan, model) if isinstance(plan, Plan) else plan
        parallelize_module(model, tp_mesh, dict(styles))
        gather_logits_in_generate(model)
        heads = [path for path, style in styles.items() if _has_sharded_logits(getattr(style, "style", None))]
        gather_logits_for_labels(model, heads)
        return_full_hidden_states(model)
