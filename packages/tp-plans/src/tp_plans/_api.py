"""Every public name, imported from its home; ``tp_plans`` itself imports this at the first use of one."""

from __future__ import annotations

from tp_plans.checks import check
from tp_plans.errors import CapabilityError, CheckFailedError, PlanError, TpPlansError, UnknownArchitectureError
from tp_plans.explanation import explain
from tp_plans.infer.experts import with_expert_parallelism
from tp_plans.layouts import Partial, Replicate, Shard
from tp_plans.plan import Plan
from tp_plans.registry import architectures, register
from tp_plans.resolve import plan_for
from tp_plans.styles import (
    ColwiseParallel,
    DispatchExperts,
    ExpertsParallel,
    GatherSequence,
    NoParallel,
    ParameterStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    Style,
    VocabParallelEmbedding,
)
from tp_plans.verification import verify_plan

__all__ = ["CapabilityError", "CheckFailedError", "ColwiseParallel", "DispatchExperts", "ExpertsParallel"]
__all__ += ["GatherSequence", "NoParallel", "ParameterStyle", "Partial", "Plan", "PlanError"]
__all__ += ["PrepareModuleInput", "Replicate", "RowwiseParallel", "SequenceParallel", "Shard", "Style"]
__all__ += ["TpPlansError", "UnknownArchitectureError", "VocabParallelEmbedding", "architectures", "check"]
__all__ += ["explain", "plan_for", "register", "verify_plan", "with_expert_parallelism"]
