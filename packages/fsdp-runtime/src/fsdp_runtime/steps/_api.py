"""The public names of ``fsdp_runtime.steps``, imported at the first use of a name."""

from __future__ import annotations

from fsdp_runtime.step import Step
from fsdp_runtime.steps.checkpointing import ActivationCheckpointing, SelectiveCheckpoint
from fsdp_runtime.steps.compile import Compile
from fsdp_runtime.steps.context.attention import ContextAttention
from fsdp_runtime.steps.context.step import ContextParallel
from fsdp_runtime.steps.documents.shared_prefixes import SharedPrefixes
from fsdp_runtime.steps.documents.step import PackedSequences
from fsdp_runtime.steps.experts.step import ExpertParallel
from fsdp_runtime.steps.float8 import Float8
from fsdp_runtime.steps.fsdp.step import FSDP2
from fsdp_runtime.steps.guards.check_inputs import CheckInputs
from fsdp_runtime.steps.multi_token_heads import MultiTokenHeads
from fsdp_runtime.steps.pipeline.schedule import forward_backward, forward_only
from fsdp_runtime.steps.pipeline.step import Pipeline
from fsdp_runtime.steps.quantized.step import Quantized
from fsdp_runtime.steps.routing.balance import RouterBalance, load_table
from fsdp_runtime.steps.routing.global_aux_loss import GlobalAuxLoss
from fsdp_runtime.steps.routing.routes import Routes, routes_from_generator
from fsdp_runtime.steps.tensor.step import TensorParallel

__all__ = [
    "FSDP2",
    "ActivationCheckpointing",
    "CheckInputs",
    "Compile",
    "ContextAttention",
    "ContextParallel",
    "ExpertParallel",
    "Float8",
    "GlobalAuxLoss",
    "MultiTokenHeads",
    "PackedSequences",
    "Pipeline",
    "Quantized",
    "RouterBalance",
    "Routes",
    "SelectiveCheckpoint",
    "SharedPrefixes",
    "Step",
    "TensorParallel",
    "forward_backward",
    "forward_only",
    "load_table",
    "routes_from_generator",
]
