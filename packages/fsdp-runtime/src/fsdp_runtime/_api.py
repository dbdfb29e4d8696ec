"""Every public name, imported from its home; ``fsdp_runtime`` itself imports this at the first use of one."""

from __future__ import annotations

from fsdp_runtime.apply import parallelize
from fsdp_runtime.debug.describe import describe_parallelism
from fsdp_runtime.debug.finite_grads import assert_finite_gradients
from fsdp_runtime.debug.replica_check import assert_replicas_equal
from fsdp_runtime.errors import (
    BackendError,
    FsdpRuntimeError,
    GradientError,
    LayoutError,
    MeshError,
    ModelError,
    OptionError,
    WeightsError,
)
from fsdp_runtime.memory.gradient_accumulation import no_sync
from fsdp_runtime.memory.offload import offload, onload
from fsdp_runtime.memory.unshard import unsharded
from fsdp_runtime.mesh.spec import MeshSpec, adopt_mesh, submesh
from fsdp_runtime.parallelism import resolve_parallelism
from fsdp_runtime.steps.context.sharding import sequence_layout
from fsdp_runtime.steps.fsdp.step import FSDP2
from fsdp_runtime.steps.guards.check_inputs import assert_inputs_equal
from fsdp_runtime.steps.outputs.lm_head import forward_with_lm_head
from fsdp_runtime.steps.routing.replay import record_routes, replay_routes
from fsdp_runtime.steps.tensor.lora import save_adapter
from fsdp_runtime.training_state import load_training_state, save_training_state
from fsdp_runtime.weights import (
    init_adapters,
    load_adapter,
    load_weights,
    materialize,
    meta_device,
    save_weights,
    stream_weights,
)

__all__ = [
    "FSDP2",
    "BackendError",
    "FsdpRuntimeError",
    "GradientError",
    "LayoutError",
    "MeshError",
    "MeshSpec",
    "ModelError",
    "OptionError",
    "WeightsError",
    "adopt_mesh",
    "assert_finite_gradients",
    "assert_inputs_equal",
    "assert_replicas_equal",
    "describe_parallelism",
    "forward_with_lm_head",
    "init_adapters",
    "load_adapter",
    "load_training_state",
    "load_weights",
    "materialize",
    "meta_device",
    "no_sync",
    "offload",
    "onload",
    "parallelize",
    "record_routes",
    "replay_routes",
    "resolve_parallelism",
    "save_adapter",
    "save_training_state",
    "save_weights",
    "sequence_layout",
    "stream_weights",
    "submesh",
    "unsharded",
]
