"""Verify a plan by running it: parts of the model in full and split, outputs and all gradients compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tp_plans._validate import is_integer
from tp_plans.errors import PlanError
from tp_plans.plan import Plan
from tp_plans.verification.report import VerificationReport, WrongPart

#: Ranks that one machine's CPU runs at most.
MAX_PROCESSES = 64

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["VerificationReport", "WrongPart", "verify_plan"]


def verify_plan(
    model: Any, plan: Plan, *, tp: int = 2, inputs: Mapping[str, Any] | None = None, mesh: DeviceMesh | None = None
) -> VerificationReport:
    """Run a model in full and split by a plan, in float64, and compare the outputs and every gradient (imports torch).

    ``check`` reads a plan and a model.  The code of the model's forward it cannot see: the order of fused
    matrices, the order of heads, which features meet one another.  This runs a small copy.  A small model with weights
    is copied; any other of transformers is built from its config at small sizes, with one layer of each kind; any
    other gets random weights and keeps one block of each kind.  Parameters are moved a little, so that zero biases and
    norms of one hide nothing.  Where the plan is wrong, each part of the model is split by itself, to find those that
    are.

    Args:
        model: a ``torch.nn.Module`` on any device (meta is enough); it is not changed.
        plan: the plan.
        tp: the ranks to split over, each a process of this machine's CPU.
        inputs: keyword arguments of the model's forward; by default token ids ``[2, 7]``, by position.
        mesh: the axis; its ranks split the model, in place of new processes, and every rank has to call this.

    Returns:
        The report.  Its bounds allow for parts that compute in float32: 1e-5 for outputs, 1e-4 for gradients,
        relative to the largest element.

    Raises:
        ModelError: no copy of the model can be built or run, with the reasons.
        CheckFailedError: the plan does not fit the copy.
        CapabilityError: no ranks can be started in this process, and no mesh was given.
        PlanError: an argument is of another type.

    Example:
        >>> import torch, tp_plans
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = torch.nn.Embedding(16, 8)
        ...         self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(16, 8)
        ...     def forward(self, ids):
        ...         gate, up = self.up(self.embed(ids)).chunk(2, -1)
        ...         return self.down(gate.sigmoid() * up)
        >>> rules = {"up": tp_plans.ColwiseParallel(), "down": tp_plans.RowwiseParallel()}
        >>> tp_plans.verify_plan(Model(), tp_plans.Plan(rules)).right
        False
        >>> rules["up"] = tp_plans.ColwiseParallel(fused_sizes=(1, 1))
        >>> tp_plans.verify_plan(Model(), tp_plans.Plan(rules)).right
        True
    """
    if not is_integer(tp, least=2) or tp > MAX_PROCESSES:
        raise PlanError(f"tp is {tp!r}: give the number of ranks to split over, 2 to {MAX_PROCESSES}")
    from tp_plans.verification.ranks import require_axis
    from tp_plans.verification.tiny import tiny_model
    from tp_plans.verification.verify import verify_tiny

    require_axis(mesh)
    tp = tp if mesh is None else mesh.size()
    if not plan:
        return VerificationReport(plan.name, tp, f"{type(model).__name__} not run, since the plan has no rules")
    return verify_tiny(tiny_model(model, tp=tp), plan, tp=tp, inputs=inputs, mesh=mesh)
