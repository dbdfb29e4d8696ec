"""Applying a plan: checked as a whole, then handed to torch."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from fsdp_runtime.errors import ModelError, OptionError
from tp_plans import ColwiseParallel, Plan, Replicate, Style, check
from tp_plans.torch_styles import styles_by_path

logger = logging.getLogger(__name__)

Logits = Literal["sharded", "full"]


def prepared_plan(plan: Plan, *, logits: Logits) -> Plan:
    """The plan with logits as asked: sharded on the vocabulary, or gathered into a plain tensor on every rank.

    Raises:
        OptionError: ``logits`` is neither ``"sharded"`` nor ``"full"``.
    """
    if logits not in get_args(Logits):
        raise OptionError(f"logits={logits!r}: write 'sharded' or 'full'")
    if logits == "sharded":
        return plan
    heads: dict[str, Style | None] = {
        pattern: replace(style, output=Replicate(), use_local_output=True)
        for pattern, style in plan.items()
        if isinstance(style, ColwiseParallel) and not style.use_local_output
    }
    return plan.override(heads)


def check_plan(model: nn.Module, plan: Plan, tp: int) -> None:
    """Raise unless the plan can be applied to the model at this size; nothing is changed.

    Raises:
        ModelError: the model is parallelized already.
        tp_plans.CheckFailedError: the plan does not fit; every finding is listed.
    """
    distributed = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if distributed:
        raise ModelError(
            f"{len(distributed)} parameters are DTensors already, first {distributed[0]}: a model is parallelized "
            "once; build a fresh one"
        )
    report = check(plan, model, tp=tp)
    report.raise_on_error()
    for finding in report.findings:
        logger.warning("%s", finding)


def apply_tp(model: nn.Module, plan: Plan, tp_mesh: DeviceMesh) -> None:
    """Check a plan against the model, then split the model over a one-axis mesh, in place.

    Parameters that every rank already holds are taken from the first rank of the axis, as in torch.

    Raises:
        ModelError: the model is parallelized already.
        tp_plans.CheckFailedError: the plan does not fit; the model is untouched.
    """
    check_plan(model, plan, tp_mesh.size())
    parallelize_module(model, tp_mesh, dict(styles_by_path(plan, model)))
