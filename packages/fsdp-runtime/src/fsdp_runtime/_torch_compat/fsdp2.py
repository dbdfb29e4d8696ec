"""FSDP2's state of a model: its sharded and gathered parameters, and the reduction of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat.meshes import local_tensor

_AFTER_INITIALIZATION: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()


def sharded_parameters(model: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter]:
    """FSDP2's sharded parameters by owning module and name; tied parameters under every owner."""
    # The modules of a gathered unit hold full tensors in the dtype of the mixed-precision policy. torch returns the
    # shards publicly only after the full tensors are dropped (``FSDPModule.reshard``; pytorch/pytorch#120879).
    shards: dict[tuple[nn.Module, str], nn.Parameter] = {}
    for fsdp_parameter in fsdp_parameters(model):
        shards.update(dict.fromkeys(_places(fsdp_parameter._module_info), fsdp_parameter.sharded_param))
    return shards


def initialize_root(root: FSDPModule) -> None:
    """Initialize FSDP2's state of a root and the modules below it, as the root's first forward does."""
    # An earlier backward does not know the root and does not reduce the gradients of the root's own parameters.
    # ``unshard()`` initializes one module's parameters only (introduced so in pytorch/pytorch#117881). A submodule
    # that ran earlier took itself for the root; torch refuses it.
    state: Any = root._get_fsdp_state()
    if state._is_root is None:
        for module in root.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module._get_fsdp_state()._is_root = None
    state._lazy_init()
    if (function := _AFTER_INITIALIZATION.get(root)) is not None:
        function()


def after_initialization(root: Any, function: Callable[[], None]) -> None:
    """Call a function whenever a root was initialized: the first time replaces the shards' local tensors."""
    _AFTER_INITIALIZATION[root] = function


def unreduced_gradients(unit: FSDPModule) -> list[nn.Parameter]:
    """Return the shards of an FSDP module with gradients that are not reduced, or not over replicas."""
    # ``set_requires_gradient_sync(False)`` intends such gradients.
    return [
        parameter.sharded_param
        for group in _parameter_groups(unit)
        for parameter in group.fsdp_params
        if parameter.unsharded_accumulated_grad is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        or (group._partial_reduce_output is not None and parameter.sharded_param.requires_grad)
    ]


def accumulates(root: FSDPModule) -> bool:
    """Return whether backwards of an initialized root leave gradients unreduced, as in ``no_sync``."""
    return not all(group.reduce_grads and group.all_reduce_grads for _, group in _groups_below(root))


def placeholder(shard: Any) -> DTensor:
    """Return zeros of a shard's shape in the memory of one number; torch refuses to scale the zeros in place."""
    local = local_tensor(shard)
    return DTensor.from_local(
        local.new_zeros(()).expand_as(local),
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce the gradients that are not reduced yet, as FSDP2 does at the end of a backward."""
    # A backward through no FSDP module's output skips this reduction.
    state: Any = root._get_fsdp_state()
    state._root_post_backward_final_callback()


def gathered_copies(unit: FSDPModule, *, now: bool = True) -> dict[nn.Parameter, nn.Parameter]:
    """The gathered parameters that an FSDP module holds ``now``, or has ever held, with their shards."""
    return {
        parameter._unsharded_param: parameter.sharded_param
        for group in _parameter_groups(unit)
        if group.is_unsharded or not now
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    }


def gathered_units(root: FSDPModule) -> list[Any]:
    """The FSDP modules of an initialized root that hold gathered copies."""
    return list(dict.fromkeys(state._modules[0] for state, group in _groups_below(root) if group.is_unsharded))


def has_gradient_hooks(root: FSDPModule) -> bool:
    """Return whether a shard of an initialized root has hooks of ``register_hook``."""
    shards = [parameter.sharded_param for _, group in _groups_below(root) for parameter in group.fsdp_params]
    return bool([shard for shard in shards if shard._backward_hooks])


def replaced_parameters(root: FSDPModule) -> list[tuple[nn.Module, str]]:
    """The places in an initialized root with a tensor that FSDP2 does not gather."""
    return [
        (module, name)
        for _, group in _groups_below(root)
        for parameter in group.fsdp_params
        for module, name in _places(parameter._module_info)
        if ((tensor := module._parameters.get(name)) is not parameter.sharded_param or _is_swapped(parameter))
        and tensor is not getattr(parameter, "_unsharded_param", None)
    ]


def _is_swapped(parameter: Any) -> bool:
    """Return whether FSDP2 gathers memory that is not the shard's, as after the conversion of one module."""
    local, gathered = parameter.sharded_param._local_tensor, parameter._sharded_param_data
    return type(local) is type(gathered) is Tensor and not torch._C._is_alias_of(local, gathered)  # type: ignore[attr-defined]


def _places(info: Any) -> list[tuple[nn.Module, str]]:
    """Return the modules that have a parameter, with its names there."""
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def copied_versions(unit: FSDPModule) -> tuple[int, ...]:
    """The versions of the shards that an FSDP module holds gathered copies of."""
    # Operators on a DTensor raise its version; operators on its local tensor raise the local tensor's.
    return tuple(shard._version + local_tensor(shard)._version for shard in gathered_copies(unit).values())


def show_shards(unit: FSDPModule) -> None:
    """Put a gathered FSDP module's shards into its modules; a backward gets the copies, a forward gathers again."""
    for group in _parameter_groups(unit):
        for parameter in group.fsdp_params:
            parameter._setattr_on_modules(parameter.sharded_param)
        group.unshard = partial(_unshard, group)


def _unshard(group: Any, async_op: bool = False) -> None:
    vars(group).pop("unshard", None)
    if group.is_unsharded and group._training_state.name == "PRE_BACKWARD":
        for parameter in group.fsdp_params:
            parameter._unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)  # as after a new gather
            parameter._setattr_on_modules(parameter._unsharded_param)
    elif group.is_unsharded:
        group._to_sharded()
    group.unshard(async_op)


def prefetched_shards(unit: FSDPModule) -> list[nn.Parameter]:
    """Return the shards of other modules that a module gathers in its forward."""
    states = unit._get_fsdp_state()._states_to_forward_prefetch
    return [each.sharded_param for state in states for group in _groups_of(state) for each in group.fsdp_params]


def in_forward(unit: FSDPModule) -> bool:
    """Return True while the root of an FSDP module runs its forward."""
    state: Any = unit._get_fsdp_state()
    return any(root._training_state.name == "FORWARD" for root in state._state_ctx.all_states[:1])


def reset_after_error(root: FSDPModule) -> None:
    """Reset FSDP2's state if the last forward or backward raised; gathered parameters are freed."""
    # A failed backward's unreduced gradients are dropped, also ``no_sync``'s. A failed forward changes no gradient;
    # ``reset_iter_state`` (torch 2.13 and later) would drop gradients after it, too.
    state: Any = root._get_fsdp_state()
    idle = type(state._training_state).IDLE
    passes = {other._training_state.name for other in state._state_ctx.all_states if other._training_state is not idle}
    if not passes:
        return
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    for other in state._state_ctx.all_states:
        other._training_state = type(other._training_state).IDLE
        for group in _groups_of(other):
            group._training_state = type(group._training_state).IDLE
            group.wait_for_unshard()  # of a prefetched module
            group.reshard()
            if passes != {"FORWARD"}:
                _drop_unreduced(group, group.fsdp_params)


def drop_unreduced_gradients(unit: FSDPModule, shards: Container[nn.Parameter]) -> bool:
    """Drop the unreduced gradients of some shards; return ``False`` if they share a buffer with other gradients."""
    # Gradients that wait for the all-reduce between replicas share a buffer.
    for group in _parameter_groups(unit):
        chosen = [parameter for parameter in group.fsdp_params if parameter.sharded_param in shards]
        trained = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
        if chosen and group._partial_reduce_output is not None and not set(trained) <= set(chosen):
            return False
        if chosen:
            _drop_unreduced(group, chosen)
    return True


def _drop_unreduced(group: Any, parameters: Iterable[Any]) -> None:
    group._partial_reduce_output = None
    for parameter in parameters:
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def offloads_to_cpu(model: nn.Module) -> bool:
    """Return True if FSDP2 keeps the model's shards on the CPU."""
    return any(bool(parameter.offload_to_cpu) for parameter in fsdp_parameters(model))


def gathered_bytes(unit: FSDPModule) -> int:
    """Return the bytes of an FSDP module's own parameters while they are gathered, without padding."""
    state: Any = unit._get_fsdp_state()
    dtype = state._mp_policy.param_dtype
    return sum(
        parameter._orig_size.numel()
        * (dtype if dtype and parameter.sharded_param.is_floating_point() else parameter.sharded_param.dtype).itemsize
        for group in _parameter_groups(unit)
        for parameter in group.fsdp_params
    )


def fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    """Iterate over FSDP2's records of parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _parameter_groups(module):
                yield from group.fsdp_params


def set_gathers(model: nn.Module, gathers: Mapping[nn.Module, Any]) -> None:
    """Let FSDP2 gather the weights of some modules by ``before`` and ``after`` of their gathers."""
    # FSDP2 looks for the two functions on the local tensor, and documents them for subclasses; an attribute leaves
    # optimizers and saves a plain tensor.  A parameter that was gathered before keeps its buffers, and its format.
    for parameter in fsdp_parameters(model):
        gather, local = gathers.get(parameter._module_info.module), local_tensor(parameter.sharded_param)
        is_weight = parameter._module_info.param_name == "weight"
        is_late = hasattr(parameter, "_unsharded_param") and not hasattr(parameter, "_extensions_data")
        if gather is not None and is_weight and not is_late and not hasattr(local, "fsdp_pre_all_gather"):
            local.fsdp_pre_all_gather, local.fsdp_post_all_gather = gather.before, gather.after  # type: ignore[attr-defined]
            parameter._init_extensions()


def write_gathered(parameter: Tensor, values: Tensor) -> None:
    """Write the values of a gathered parameter; autograd takes them for the values of the forward."""
    # FSDP2 writes under this context likewise.
    local = local_tensor(parameter)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(local):  # type: ignore[attr-defined]
        local.copy_(values)


def _groups_below(root: FSDPModule) -> list[tuple[Any, Any]]:
    """Return pairs of state and group below an initialized root, in a fast loop: every forward calls this."""
    state: Any = root._get_fsdp_state()
    pairs = []
    for below in state._state_ctx.all_states:
        groups = getattr(below, "_fsdp_param_groups", None)
        pairs += [
            (below, group) for group in ([below._fsdp_param_group] if groups is None else groups) if group is not None
        ]
    return pairs


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    return _groups_of(unit._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # several groups per unit in newer versions
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]
