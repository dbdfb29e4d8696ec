"""Every public name, imported from its home; ``tp_plans`` itself imports this at the first use of one."""

from __future__ import annotations

from tp_plans.checks import Finding, Report, check
from tp_plans.decoder import Decoder, Experts, Fused, Mixer, Unsplit, decoder_plan
from tp_plans.diff import Change, PlanDiff
from tp_plans.errors import (
    AlreadyParallelizedError,
    CapabilityError,
    CheckFailedError,
    CustomPlanError,
    LayoutError,
    ModelConfigError,
    ModelError,
    PlanError,
    TpPlansError,
    UnknownArchitectureError,
    UnknownStyleError,
)
from tp_plans.explanation import Collective, Explanation, PlacedParameter, RuleExplanation, explain
from tp_plans.families import Architecture
from tp_plans.hugging_face import from_hugging_face
from tp_plans.layouts import Layout, Partial, Replicate, Shard
from tp_plans.multiples import RequiredMultiple, required_multiple
from tp_plans.plan import Plan
from tp_plans.registry import architectures, plan_for, register
from tp_plans.resolve import resolve_plan
from tp_plans.styles import (
    BareParameter,
    ColwiseParallel,
    DividedInput,
    ExpertsParallel,
    FeatureParallelEmbedding,
    GatheredParameters,
    LatentProjection,
    ParallelAttention,
    PrepareInput,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    Style,
    SumOutput,
    VocabParallelEmbedding,
    WholeSequence,
)
from tp_plans.suggestion import Doubt, Suggestion, suggest
from tp_plans.without_sums import rowwise_free

__all__ = [
    "AlreadyParallelizedError",
    "Architecture",
    "BareParameter",
    "CapabilityError",
    "Change",
    "CheckFailedError",
    "Collective",
    "ColwiseParallel",
    "CustomPlanError",
    "Decoder",
    "DividedInput",
    "Doubt",
    "Experts",
    "ExpertsParallel",
    "Explanation",
    "FeatureParallelEmbedding",
    "Finding",
    "Fused",
    "GatheredParameters",
    "LatentProjection",
    "Layout",
    "LayoutError",
    "Mixer",
    "ModelConfigError",
    "ModelError",
    "ParallelAttention",
    "Partial",
    "PlacedParameter",
    "Plan",
    "PlanDiff",
    "PlanError",
    "PrepareInput",
    "Replicate",
    "Replicated",
    "Report",
    "RequiredMultiple",
    "RowwiseParallel",
    "RuleExplanation",
    "SequenceParallel",
    "Shard",
    "Style",
    "Suggestion",
    "SumOutput",
    "TpPlansError",
    "UnknownArchitectureError",
    "UnknownStyleError",
    "Unsplit",
    "VocabParallelEmbedding",
    "WholeSequence",
    "architectures",
    "check",
    "decoder_plan",
    "explain",
    "from_hugging_face",
    "plan_for",
    "register",
    "required_multiple",
    "resolve_plan",
    "rowwise_free",
    "suggest",
]
