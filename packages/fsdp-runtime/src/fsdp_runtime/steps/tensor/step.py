"""Tensor and sequence parallelism: a checked plan, applied with torch's ``parallelize_module``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from fsdp_runtime._torch_compat import hook_gradient
from fsdp_runtime.errors import OptionError
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.outputs.full_tensors import has_sharded_logits
from fsdp_runtime.steps.tensor.lora import resolve_adapted_plan
from fsdp_runtime.values import require_bool, require_one_of
from tp_plans import Plan, Replicate, Style, UnknownArchitectureError, check
from tp_plans.runtime import fused_rows

logger = logging.getLogger(__name__)

PlanSource = Plan | Mapping[str, Style | str] | str | None
Logits = Literal["sharded", "full"]
Towers = Literal["sharded", "replicated"]
#: peft's names of the factors of an adapter.
LOW_RANK = {"lora_A", "lora_B"}


def with_logits(plan: Plan, logits: Logits) -> Plan:
    """Return the plan with logits sharded on the vocabulary, or gathered into a plain tensor on every rank."""
    if logits == "sharded":
        return plan
    heads: dict[str, Style | None] = {
        pattern: replace(style, output_layouts=Replicate(), use_local_output=True)
        for pattern, style in plan.items()
        if has_sharded_logits(style)
    }
    return plan.override(heads)


def _plain(gradient: Tensor) -> Tensor:
    """Return the gradient of one plain element that was multiplied with a DTensor, such as a learned temperature."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def check_plan(model: nn.Module, plan: Plan, *, tp: int = 1, ep: int = 1) -> tuple[str, ...]:
    """Check a plan against a model and the sizes of ``tp`` and ``ep``; return the warnings, which are also logged."""
    report = check(plan, model, tp=tp, ep=ep)
    report.raise_on_error()
    # Factors that the rule of their layer replicates are small beside it, and no other rule is right.
    findings = tuple(str(finding) for finding in report.findings if LOW_RANK.isdisjoint(finding.where.split(".")))
    for finding in findings:
        logger.warning("%s", finding)
    return findings


@dataclass(frozen=True)
class TensorParallel(Step[tuple[str, ...]]):
    """Shard the layers of a model over ``tp`` by a plan.

    Parameters that hold values on every rank are taken from the first rank of the axis, as in torch.

    Args:
        plan: ``"auto"`` (the architecture's plan, else one that is inferred and verified by running a small copy of the
            model on the ranks of ``tp``), ``"own"``, ``"transformers"`` or ``"inferred"`` (with its doubts) as in
            ``tp_plans.plan_for``, a plan, a dict of pattern to style or style name, a dotted path to one, or ``None``
            to replicate every layer.  Not used where ``tp`` has size 1.
        sequence_parallel: shard activations between blocks over ``tp``, on the sequence dim.
        towers: under ``plan="auto"``, the layers of vision and audio towers and projectors: ``"sharded"`` over ``tp``
            like the layers of the language model, or ``"replicated"``.
        logits: ``"sharded"`` on the vocabulary (a DTensor, which ``rl_logprobs`` takes), or ``"full"``: a plain tensor
            on every rank.  A forward that gets ``labels`` gathers them for the model's own loss.

    Raises:
        OptionError: a value is not allowed.
    """

    plan: PlanSource = "auto"
    sequence_parallel: bool = False
    towers: Towers = "sharded"
    logits: Logits = "sharded"

    def __post_init__(self) -> None:
        require_one_of("logits", self.logits, get_args(Logits))
        require_one_of("towers", self.towers, get_args(Towers))
        require_bool("sequence_parallel", self.sequence_parallel)
        if self.plan is None and self.sequence_parallel:
            raise OptionError("sequence_parallel=True needs a plan, and plan=None was given")

    def resolve(self, setup: Setup) -> Setup:
        """Find the plan if layers are sharded."""
        tp_mesh, setup = setup.meshes.tp, replace(setup, sequence_parallel=self.sequence_parallel)
        if self.plan is None:
            if tp_mesh is not None:
                logger.warning("plan=None on a mesh with tp=%d: every rank of tp computes the same", setup.tp)
            return replace(setup, meshes=replace(setup.meshes, tp=None))
        if tp_mesh is None and (setup.meshes.ep is None or self.plan == "auto"):
            return setup
        setup.facts.require_not_compiled()
        try:
            return replace(setup, plan=self.plan_for(setup))
        except UnknownArchitectureError as error:
            if setup.meshes.ep is None or self.plan != "auto" or self.sequence_parallel:
                raise
            logger.warning("only experts are sharded, and every rank of tp computes all other layers: %s", error)
            return setup

    def plan_for(self, setup: Setup) -> Plan | Mapping[str, ParallelStyle]:
        """Return the plan for the setup's model."""
        plan = resolve_adapted_plan(
            self.plan,
            setup.facts.model,
            sequence_parallel=self.sequence_parallel,
            mesh=setup.meshes.tp,
            towers_tp=setup.tp if self.plan == "auto" and self.towers == "sharded" else None,
        )
        return with_logits(plan, self.logits)

    def check(self, setup: Setup) -> tuple[str, ...]:
        """Check the plan against the model, with the rules of the axis ``ep``; return the warnings."""
        plan, ep_mesh = setup.plan if setup.meshes.tp is not None else setup.expert_plan, setup.meshes.ep
        if not isinstance(plan, Plan):
            return ()
        return check_plan(setup.facts.model, plan, tp=setup.tp, ep=1 if ep_mesh is None else ep_mesh.size())

    def apply(self, model: nn.Module, setup: Setup, checked: tuple[str, ...]) -> None:
        """Shard the layers; without a plan, shard nothing."""
        tp_mesh = setup.meshes.tp
        if setup.plan is None or tp_mesh is None:
            return
        plan = setup.plan.on_axis("tp") if isinstance(setup.plan, Plan) else setup.plan
        styles: Mapping[str, Any] = plan.to_torch(model) if isinstance(plan, Plan) else plan
        if isinstance(plan, Plan):  # an attention module counts this rank's heads afterwards
            runtime_state(model).fused_rows = fused_rows(model, plan)
        parallelize_module(model, tp_mesh, dict(styles))
        for parameter in model.parameters():
            if parameter.numel() == 1 and parameter.is_floating_point() and not isinstance(parameter, DTensor):
                hook_gradient(parameter, _plain)
