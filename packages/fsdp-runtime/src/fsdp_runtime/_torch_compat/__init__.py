"""Every use of a private torch API in this package, by subject, with its reason and the versions it works on.

``tests/test_torch_compat.py`` fails where a later torch has what a function here replaces.
"""

from fsdp_runtime._torch_compat.attention import (
    causal_bias,
    flash_attention,
    flash_attention_backward,
    has_flash_attention,
)
from fsdp_runtime._torch_compat.autograd import autograd_position, check_saved_tensors, in_backward, running_backward_of
from fsdp_runtime._torch_compat.collectives import (
    MICRO_PIPELINE,
    all_gather_flat,
    clone_default_store,
    enable_symmetric_memory,
    group_of,
    reduce_scatter_flat,
    separate_group,
)
from fsdp_runtime._torch_compat.dispatch import (
    TorchDispatchMode,
    observe_storage_resizes,
    storage_key,
    tree_leaves,
    wrapper_tensor,
    written_arguments,
)
from fsdp_runtime._torch_compat.fake_tensors import (
    clear_dtensor_caches,
    data_dependent_errors,
    fake_store,
    fake_tensors,
)
from fsdp_runtime._torch_compat.fsdp2 import (
    copied_versions,
    drop_unreduced_gradients,
    gathered_bytes,
    gathered_copies,
    in_forward,
    initialize_root,
    offloads_to_cpu,
    parameter_owners,
    reduce_gradients,
    reset_after_error,
    sharded_parameters,
    unreduced_gradients,
)
from fsdp_runtime._torch_compat.meshes import flatten_axes, is_strided, join_axes, local_tensor, root_mesh
from fsdp_runtime._torch_compat.modules import (
    children,
    forward_pre_hooks,
    has_forward,
    is_compiled,
    own_parameters,
    parameter_hooks,
    persistent_buffers,
    set_parameter_hooks,
)

__all__ = [
    "MICRO_PIPELINE",
    "TorchDispatchMode",
    "all_gather_flat",
    "autograd_position",
    "causal_bias",
    "check_saved_tensors",
    "children",
    "clear_dtensor_caches",
    "clone_default_store",
    "copied_versions",
    "data_dependent_errors",
    "drop_unreduced_gradients",
    "enable_symmetric_memory",
    "fake_store",
    "fake_tensors",
    "flash_attention",
    "flash_attention_backward",
    "flatten_axes",
    "forward_pre_hooks",
    "gathered_bytes",
    "gathered_copies",
    "group_of",
    "has_flash_attention",
    "has_forward",
    "in_backward",
    "in_forward",
    "initialize_root",
    "is_compiled",
    "is_strided",
    "join_axes",
    "local_tensor",
    "observe_storage_resizes",
    "offloads_to_cpu",
    "own_parameters",
    "parameter_hooks",
    "parameter_owners",
    "persistent_buffers",
    "reduce_gradients",
    "reduce_scatter_flat",
    "reset_after_error",
    "root_mesh",
    "running_backward_of",
    "separate_group",
    "set_parameter_hooks",
    "sharded_parameters",
    "storage_key",
    "tree_leaves",
    "unreduced_gradients",
    "wrapper_tensor",
    "written_arguments",
]
