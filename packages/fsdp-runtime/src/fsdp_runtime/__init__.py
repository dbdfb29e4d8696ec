"""Everything between a model and a running mesh: plans applied, FSDP2, weights in and out."""

from __future__ import annotations

from fsdp_runtime.debug.describe import ParallelismReport, describe_parallelism
from fsdp_runtime.debug.finite_grads import assert_finite_gradients
from fsdp_runtime.debug.replica_check import assert_replicas_equal
from fsdp_runtime.errors import (
    BackendError,
    CheckpointError,
    ConversionError,
    EstimateError,
    FsdpRuntimeError,
    GradientError,
    LayoutError,
    LostRankError,
    MeshError,
    MetaBufferError,
    MismatchError,
    ModelError,
    OffloadError,
    OptionError,
    OtherRankError,
    ReplicaError,
    WeightsError,
)
from fsdp_runtime.estimate import Estimate, Sweep, estimate, sweep
from fsdp_runtime.memory.gradient_accumulation import no_sync
from fsdp_runtime.memory.offload import OffloadReport, offload, onload
from fsdp_runtime.memory.unshard import unsharded
from fsdp_runtime.mesh.rendezvous import RankInfo, rank_info_from_env
from fsdp_runtime.mesh.spec import MeshSpec, adopt_mesh, submesh
from fsdp_runtime.model.structure import AttentionHeads, ModelStructure, inspect_model
from fsdp_runtime.monitor import RankMonitor, monitor_ranks
from fsdp_runtime.monitor.signals import stop_on_signal
from fsdp_runtime.parallel.activation_checkpoint import SelectiveCheckpoint, apply_ac
from fsdp_runtime.parallel.check_inputs import assert_inputs_equal
from fsdp_runtime.parallel.compile import apply_compile
from fsdp_runtime.parallel.context.apply import apply_cp
from fsdp_runtime.parallel.context.attention import ContextAttention
from fsdp_runtime.parallel.context.ring import ring_attention
from fsdp_runtime.parallel.context.sharding import SequenceLayout, sequence_layout
from fsdp_runtime.parallel.fsdp import apply_fsdp, fsdp_mesh
from fsdp_runtime.parallel.fsdp_options import FSDPOptions
from fsdp_runtime.parallel.lm_head import LMHeadParameters, forward_with_lm_head
from fsdp_runtime.parallel.lora import save_adapter
from fsdp_runtime.parallel.packing.apply import apply_packing
from fsdp_runtime.parallel.tensor import apply_tp
from fsdp_runtime.parallelism import Parallelism, resolve_parallelism
from fsdp_runtime.parallelize import parallelize
from fsdp_runtime.training_state import TrainingState, load_training_state, save_training_state
from fsdp_runtime.weights import (
    LoadReport,
    WeightExport,
    WeightInfo,
    describe_weights,
    flatten_bucket,
    init_adapters,
    load_adapter,
    load_weights,
    materialize,
    meta_device,
    save_weights,
    send_weights,
    stream_buckets,
    stream_weights,
    unflatten_bucket,
)

__version__ = "0.1.0"

__all__ = [
    "AttentionHeads",
    "BackendError",
    "CheckpointError",
    "ContextAttention",
    "ConversionError",
    "Estimate",
    "EstimateError",
    "FSDPOptions",
    "FsdpRuntimeError",
    "GradientError",
    "LMHeadParameters",
    "LayoutError",
    "LoadReport",
    "LostRankError",
    "MeshError",
    "MeshSpec",
    "MetaBufferError",
    "MismatchError",
    "ModelError",
    "ModelStructure",
    "OffloadError",
    "OffloadReport",
    "OptionError",
    "OtherRankError",
    "Parallelism",
    "ParallelismReport",
    "RankInfo",
    "RankMonitor",
    "ReplicaError",
    "SelectiveCheckpoint",
    "SequenceLayout",
    "Sweep",
    "TrainingState",
    "WeightExport",
    "WeightInfo",
    "WeightsError",
    "adopt_mesh",
    "apply_ac",
    "apply_compile",
    "apply_cp",
    "apply_fsdp",
    "apply_packing",
    "apply_tp",
    "assert_finite_gradients",
    "assert_inputs_equal",
    "assert_replicas_equal",
    "describe_parallelism",
    "describe_weights",
    "estimate",
    "flatten_bucket",
    "forward_with_lm_head",
    "fsdp_mesh",
    "init_adapters",
    "inspect_model",
    "load_adapter",
    "load_training_state",
    "load_weights",
    "materialize",
    "meta_device",
    "monitor_ranks",
    "no_sync",
    "offload",
    "onload",
    "parallelize",
    "rank_info_from_env",
    "resolve_parallelism",
    "ring_attention",
    "save_adapter",
    "save_training_state",
    "save_weights",
    "send_weights",
    "sequence_layout",
    "stop_on_signal",
    "stream_buckets",
    "stream_weights",
    "submesh",
    "sweep",
    "unflatten_bucket",
    "unsharded",
]
