"""FSDP2's state of a model: its sharded and gathered parameters, and the reduction of their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def sharded_parameters(model: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter]:
    """FSDP2's sharded parameters by owning module and name; tied ones under every owner.

    While a unit is gathered its modules hold other tensors, in the dtype of the mixed-precision policy, and torch
    2.10 to 2.15 have no public way to the shards but to drop the gathered ones (``FSDPModule.reshard``;
    pytorch/pytorch#120879).
    """
    found: dict[tuple[nn.Module, str], nn.Parameter] = {}
    for fsdp_parameter in _fsdp_parameters(model):
        info = fsdp_parameter._module_info
        places = [
            (info.module, info.param_name),
            *zip(info.shared_modules, info.shared_param_names, strict=True),
        ]
        found.update(dict.fromkeys(places, fsdp_parameter.sharded_param))
    return found


def initialize_root(root: FSDPModule) -> None:
    """Initialize FSDP2's state of a root and the modules below it, as the root's first forward does.

    Until then gradients of the root's own parameters are not reduced, since a backward does not know the root.
    ``unshard()`` initializes one module's parameters only; torch 2.10 to 2.15 have no public function for all
    (introduced so in pytorch/pytorch#117881).
    """
    state: Any = root._get_fsdp_state()
    state._lazy_init()


def unreduced_gradients(unit: FSDPModule) -> int:
    """Return the number of an FSDP module's parameters with a gradient that is not reduced.

    Under ``set_requires_gradient_sync(False)`` that is intended; torch 2.10 to 2.15 have no public way to ask.
    """
    return sum(
        getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for group in _parameter_groups(unit)
        for parameter in group.fsdp_params
    )


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce the gradients that are not reduced yet, as FSDP2 does at the end of a backward.

    A backward through none of the FSDP modules' outputs does not end so, and torch 2.10 to 2.15 have no public call.
    """
    state: Any = root._get_fsdp_state()
    state._root_post_backward_final_callback()


def offloads_to_cpu(model: nn.Module) -> bool:
    """Return True if FSDP2 keeps the model's shards on the CPU (torch 2.10 to 2.15: the policy is not public again)."""
    return any(bool(parameter.offload_to_cpu) for parameter in _fsdp_parameters(model))


def gathered_bytes(unit: FSDPModule) -> int:
    """Return the bytes of an FSDP module's own parameters while they are gathered, without padding.

    In torch 2.10 to 2.15 neither the parameters of one FSDP module nor its mixed-precision policy are public.
    """
    state: Any = unit._get_fsdp_state()
    dtype = state._mp_policy.param_dtype
    return sum(
        parameter._orig_size.numel() * (dtype or parameter.sharded_param.dtype).itemsize
        for group in _parameter_groups(unit)
        for parameter in group.fsdp_params
    )


def _fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _parameter_groups(module):
                yield from group.fsdp_params


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several a unit in newer versions
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]
