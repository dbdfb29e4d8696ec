"""Every public name, imported from its home; ``fsdp_runtime`` itself imports this at the first use of one."""

from __future__ import annotations

from fsdp_runtime.batching.micro_batches import Packing
from fsdp_runtime.batching.pack import PackedRow, pack
from fsdp_runtime.batching.pack_tree import pack_tree
from fsdp_runtime.batching.tree_row import GroupMember, TreeRow
from fsdp_runtime.debug.describe import ParallelismReport, describe_parallelism
from fsdp_runtime.debug.finite_grads import assert_finite_gradients
from fsdp_runtime.debug.replica_check import assert_replicas_equal
from fsdp_runtime.dry_run import Estimate, Sweep, estimate, sweep
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
    RoutesError,
    SampleError,
    WeightsError,
    WeightSyncError,
)
from fsdp_runtime.memory.gradient_accumulation import no_sync
from fsdp_runtime.memory.offload import OffloadReport, offload, onload
from fsdp_runtime.memory.unshard import unsharded
from fsdp_runtime.mesh.rendezvous import RankInfo, rank_info_from_env
from fsdp_runtime.mesh.spec import MeshSpec, adopt_mesh, submesh
from fsdp_runtime.model.structure import AttentionHeads, ModelStructure, inspect_model
from fsdp_runtime.monitor import RankMonitor, monitor_ranks
from fsdp_runtime.monitor.signals import stop_on_signal
from fsdp_runtime.parallelism import Parallelism, resolve_parallelism
from fsdp_runtime.parallelize import parallelize
from fsdp_runtime.routing.replay import record_routes, replay_routes
from fsdp_runtime.routing.routes import Routes, routes_from_generator
from fsdp_runtime.steps.checkpointing import SelectiveCheckpoint
from fsdp_runtime.steps.context.attention import ContextAttention
from fsdp_runtime.steps.context.sharding import SequenceLayout, sequence_layout
from fsdp_runtime.steps.fsdp.options import FSDPOptions
from fsdp_runtime.steps.fsdp.step import fsdp_mesh
from fsdp_runtime.steps.guards.check_inputs import assert_inputs_equal
from fsdp_runtime.steps.outputs.lm_head import LMHeadParameters, forward_with_lm_head
from fsdp_runtime.steps.tensor.lora import save_adapter
from fsdp_runtime.sync.digest import digest, digest_layout, verify_transfer
from fsdp_runtime.sync.execute import execute_transfer
from fsdp_runtime.sync.groups import transfer_group
from fsdp_runtime.sync.model_layout import ModelShards
from fsdp_runtime.sync.quantize.formats import Quantization
from fsdp_runtime.sync.weight_sync import SyncReport, WeightSync
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
    "GroupMember",
    "LMHeadParameters",
    "LayoutError",
    "LoadReport",
    "LostRankError",
    "MeshError",
    "MeshSpec",
    "MetaBufferError",
    "MismatchError",
    "ModelError",
    "ModelShards",
    "ModelStructure",
    "OffloadError",
    "OffloadReport",
    "OptionError",
    "OtherRankError",
    "PackedRow",
    "Packing",
    "Parallelism",
    "ParallelismReport",
    "Quantization",
    "RankInfo",
    "RankMonitor",
    "ReplicaError",
    "Routes",
    "RoutesError",
    "SampleError",
    "SelectiveCheckpoint",
    "SequenceLayout",
    "Sweep",
    "SyncReport",
    "TrainingState",
    "TreeRow",
    "WeightExport",
    "WeightInfo",
    "WeightSync",
    "WeightSyncError",
    "WeightsError",
    "adopt_mesh",
    "assert_finite_gradients",
    "assert_inputs_equal",
    "assert_replicas_equal",
    "describe_parallelism",
    "describe_weights",
    "digest",
    "digest_layout",
    "estimate",
    "execute_transfer",
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
    "pack",
    "pack_tree",
    "parallelize",
    "rank_info_from_env",
    "record_routes",
    "replay_routes",
    "resolve_parallelism",
    "routes_from_generator",
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
    "transfer_group",
    "unflatten_bucket",
    "unsharded",
    "verify_transfer",
]
