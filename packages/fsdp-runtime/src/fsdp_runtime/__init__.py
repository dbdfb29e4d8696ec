"""Everything between a model and a running mesh: plans applied, FSDP2, weights in and out."""

from __future__ import annotations

from fsdp_runtime.debug.describe import ParallelReport, parallel_report
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
from fsdp_runtime.memory.gradient_accumulation import no_gradient_sync
from fsdp_runtime.memory.offload import OffloadReport, offload, onload
from fsdp_runtime.memory.unshard import unsharded
from fsdp_runtime.mesh.rendezvous import Launch, launch_from_environment
from fsdp_runtime.mesh.spec import MeshSpec, adopt_mesh, submesh
from fsdp_runtime.model.structure import Anatomy, Heads, anatomy_of
from fsdp_runtime.monitor import Watch, watch_ranks
from fsdp_runtime.monitor.signals import stop_on_signal
from fsdp_runtime.parallel.activation_checkpoint import Selective, checkpoint_activations
from fsdp_runtime.parallel.compile import compile_blocks
from fsdp_runtime.parallel.context.apply import apply_context_parallel
from fsdp_runtime.parallel.context.attention import ContextAttention
from fsdp_runtime.parallel.context.ring import ring_attention
from fsdp_runtime.parallel.context.sharding import SequenceLayout, sequence_layout
from fsdp_runtime.parallel.fsdp import ShardingOptions, data_parallel_mesh, shard_over_data_parallel
from fsdp_runtime.parallel.lora import save_adapter
from fsdp_runtime.parallel.tensor import apply_plan
from fsdp_runtime.parallelize import parallelize
from fsdp_runtime.training_state import TrainingState, load_training_state, save_training_state
from fsdp_runtime.weights import (
    LoadReport,
    WeightInfo,
    describe_weights,
    load_weights,
    materialize,
    meta_device,
    packed,
    save_weights,
    send_weights,
    stream_buckets,
    stream_weights,
    unpacked,
)

__version__ = "0.1.0"

__all__ = [
    "Anatomy",
    "BackendError",
    "CheckpointError",
    "ContextAttention",
    "ConversionError",
    "Estimate",
    "EstimateError",
    "FsdpRuntimeError",
    "GradientError",
    "Heads",
    "Launch",
    "LayoutError",
    "LoadReport",
    "LostRankError",
    "MeshError",
    "MeshSpec",
    "MetaBufferError",
    "MismatchError",
    "ModelError",
    "OffloadError",
    "OffloadReport",
    "OptionError",
    "OtherRankError",
    "ParallelReport",
    "ReplicaError",
    "Selective",
    "SequenceLayout",
    "ShardingOptions",
    "Sweep",
    "TrainingState",
    "Watch",
    "WeightInfo",
    "WeightsError",
    "adopt_mesh",
    "anatomy_of",
    "apply_context_parallel",
    "apply_plan",
    "assert_finite_gradients",
    "assert_replicas_equal",
    "checkpoint_activations",
    "compile_blocks",
    "data_parallel_mesh",
    "describe_weights",
    "estimate",
    "launch_from_environment",
    "load_training_state",
    "load_weights",
    "materialize",
    "meta_device",
    "no_gradient_sync",
    "offload",
    "onload",
    "packed",
    "parallel_report",
    "parallelize",
    "ring_attention",
    "save_adapter",
    "save_training_state",
    "save_weights",
    "send_weights",
    "sequence_layout",
    "shard_over_data_parallel",
    "stop_on_signal",
    "stream_buckets",
    "stream_weights",
    "submesh",
    "sweep",
    "unpacked",
    "unsharded",
    "watch_ranks",
]
