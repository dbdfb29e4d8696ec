"""Every public name, imported from its home; ``tp_plans`` itself imports this at the first use of one."""

from __future__ import annotations

from tp_plans.by_path import styles_by_path
from tp_plans.checks import CheckReport, Finding, check
from tp_plans.errors import CapabilityError, CheckFailedError, PlanError, TpPlansError, UnknownArchitectureError
from tp_plans.explanation import explain
from tp_plans.hugging_face import from_hugging_face
from tp_plans.infer.experts import with_expert_parallelism
from tp_plans.infer.suggest import Doubt, Suggestion, suggest
from tp_plans.infer.towers import split_towers
from tp_plans.layouts import Layout, Partial, Replicate, Shard
from tp_plans.model_tree import ModelTree
from tp_plans.plan import Plan
from tp_plans.registry import architectures, plan_for, register
from tp_plans.resolve import resolve_plan
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
from tp_plans.without_rowwise import rowwise_free

__all__ = [
    "CapabilityError",
    "CheckFailedError",
    "CheckReport",
    "ColwiseParallel",
    "DispatchExperts",
    "Doubt",
    "ExpertsParallel",
    "Finding",
    "GatherSequence",
    "Layout",
    "ModelTree",
    "NoParallel",
    "ParameterStyle",
    "Partial",
    "Plan",
    "PlanError",
    "PrepareModuleInput",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "Style",
    "Suggestion",
    "TpPlansError",
    "UnknownArchitectureError",
    "VocabParallelEmbedding",
    "architectures",
    "check",
    "explain",
    "from_hugging_face",
    "plan_for",
    "register",
    "resolve_plan",
    "rowwise_free",
    "split_towers",
    "styles_by_path",
    "suggest",
    "verify_plan",
    "with_expert_parallelism",
]
