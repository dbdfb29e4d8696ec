"""Every public name, imported from its home; ``tp_plans`` itself imports this at the first use of one."""

from __future__ import annotations

from tp_plans.batch_multiples import BatchDivisibility, batch_divisibility
from tp_plans.by_path import expert_styles_by_path, styles_by_path
from tp_plans.checks import CheckReport, Finding, check
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
    TransferError,
    UnknownArchitectureError,
    UnknownStyleError,
)
from tp_plans.explanation import CollectiveSummary, Explanation, RuleExplanation, ShardedParameter, explain
from tp_plans.hugging_face import from_hugging_face
from tp_plans.infer.experts import with_expert_parallelism
from tp_plans.infer.suggest import Doubt, Suggestion, suggest
from tp_plans.infer.towers import split_towers
from tp_plans.layouts import Layout, Partial, Replicate, Shard
from tp_plans.lora import AdapterStyles, adapter_styles
from tp_plans.model_tree import ModelTree
from tp_plans.models import Architecture
from tp_plans.models.spec import DecoderSpec, ExpertsSpec, FusedLinear, ReplicatedSublayer, SublayerSpec, decoder_plan
from tp_plans.module_attrs import resolve_style
from tp_plans.plan import Plan, PlanDiff, RuleChange
from tp_plans.registry import architectures, plan_for, register
from tp_plans.resolve import resolve_plan
from tp_plans.styles import (
    AllReduceOutput,
    ColwiseEmbedding,
    ColwiseParallel,
    DispatchExperts,
    ExpertsParallel,
    GatheredParameters,
    GatherSequence,
    MLAKVProjection,
    NoParallel,
    ParallelAttention,
    ParameterStyle,
    PrepareModuleInput,
    RowwiseParallel,
    ScaleInput,
    SequenceParallel,
    Style,
    VocabParallelEmbedding,
)
from tp_plans.transfer.block_transfer import BlockTransfer
from tp_plans.transfer.engine_layout import EngineSize, engine_layout
from tp_plans.transfer.engine_rules import EngineRule, engine_rules
from tp_plans.transfer.layout import CheckpointTensor, StoredBlock, TransferLayout, mesh_layout
from tp_plans.transfer.mesh_layout import StridedShard, mesh_boxes
from tp_plans.transfer.plan import TransferPlan, plan_cover, plan_transfer
from tp_plans.verification import VerificationReport, WrongPart, verify_plan
from tp_plans.without_rowwise import rowwise_free

__all__ = [
    "AdapterStyles",
    "AllReduceOutput",
    "AlreadyParallelizedError",
    "Architecture",
    "BatchDivisibility",
    "BlockTransfer",
    "CapabilityError",
    "CheckFailedError",
    "CheckReport",
    "CheckpointTensor",
    "CollectiveSummary",
    "ColwiseEmbedding",
    "ColwiseParallel",
    "CustomPlanError",
    "DecoderSpec",
    "DispatchExperts",
    "Doubt",
    "EngineRule",
    "EngineSize",
    "ExpertsParallel",
    "ExpertsSpec",
    "Explanation",
    "Finding",
    "FusedLinear",
    "GatherSequence",
    "GatheredParameters",
    "Layout",
    "LayoutError",
    "MLAKVProjection",
    "ModelConfigError",
    "ModelError",
    "ModelTree",
    "NoParallel",
    "ParallelAttention",
    "ParameterStyle",
    "Partial",
    "Plan",
    "PlanDiff",
    "PlanError",
    "PrepareModuleInput",
    "Replicate",
    "ReplicatedSublayer",
    "RowwiseParallel",
    "RuleChange",
    "RuleExplanation",
    "ScaleInput",
    "SequenceParallel",
    "Shard",
    "ShardedParameter",
    "StoredBlock",
    "StridedShard",
    "Style",
    "SublayerSpec",
    "Suggestion",
    "TpPlansError",
    "TransferError",
    "TransferLayout",
    "TransferPlan",
    "UnknownArchitectureError",
    "UnknownStyleError",
    "VerificationReport",
    "VocabParallelEmbedding",
    "WrongPart",
    "adapter_styles",
    "architectures",
    "batch_divisibility",
    "check",
    "decoder_plan",
    "engine_layout",
    "engine_rules",
    "expert_styles_by_path",
    "explain",
    "from_hugging_face",
    "mesh_boxes",
    "mesh_layout",
    "plan_cover",
    "plan_for",
    "plan_transfer",
    "register",
    "resolve_plan",
    "resolve_style",
    "rowwise_free",
    "split_towers",
    "styles_by_path",
    "suggest",
    "verify_plan",
    "with_expert_parallelism",
]
