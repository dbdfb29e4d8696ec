"""Calls around a parallelized model: methods that would read or replace one rank's shards, and steps of optimizers.

``RULES`` has one entry per method.  A rule runs before the method of every module with shards.  It calls the method, or
raises before anything changes.  Other methods are correct without a rule.

- An optimizer built before ``parallelize`` holds replaced parameters.  They get no gradients, so its step raises.
- FSDP2 does not reduce the gradients of plain parameters, such as a head around a model.  If their gradients or values
  differ between ranks, the first steps raise.
- A plain parameter in an operation with a DTensor, such as a learned temperature of logits, gets a partial sum as its
  gradient.  The hook replaces it by the sum before a step.
- A fused or ``foreach`` step passes a parameter group to torch in one call.  torch refuses DTensors of several meshes
  in it, or DTensors beside plain tensors.  During a step each group is divided by mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_runtime._torch_compat import parameter_hooks, set_parameter_hooks
from fsdp_runtime.errors import ModelError
from fsdp_runtime.memory.gathered_copies import after_step, before_step, free_copies, shards_of_copies
from fsdp_runtime.sharded.boxes import dtensor_box, slices_of

_SAVE = "write a checkpoint with save_weights(model, directory), or torch.save this rank's model.state_dict()"
_SAVE_ADAPTER = (
    "write the adapter with save_adapter(model, directory), or base and adapter merged with "
    "save_weights(model, directory)"
)
_ADAPTERS = "add adapters before parallelize; load_adapter(model, directory) loads an adapter's weights"
_RESIZE = "embeddings are sharded, and optimizers hold them; resize it before parallelize"
_MERGE = (
    "FSDP2 drops writes to gathered weights, in a forward or inside of 'with unsharded(model)': call merge_adapter() "
    "or unmerge_adapter() before them, and unmerge_adapter() before 'with model.disable_adapter()'"
)
_UNMERGED = (
    "an adapter is not plain LoRA, or its factors are not sharded like the weight: save_weights(model, directory) "
    "writes merged weights"
)
_ASSIGN = "full tensors with assign=True would replace shards: leave assign out"
#: Refused methods, with the reason and a replacement.
_REFUSED = {
    **dict.fromkeys(("push_to_hub", "save_distributed_checkpoint"), f"it would write one rank's shards: {_SAVE}"),
    "resize_position_embeddings": _RESIZE,
    **dict.fromkeys(("add_adapter", "load_adapter", "add_weighted_adapter", "inject_adapter"), _ADAPTERS),
    "share_memory": "memory of DTensors cannot be shared; share the plain model's",
    "__deepcopy__": f"FSDP2 cannot copy a model: parallelize a copy of the plain one; {_SAVE}",
}


def guard_methods(model: nn.Module) -> None:
    """Put the rules before the methods of every module with DTensors."""
    guards = [_Guarded(name, rule) for name, rule in RULES.items()]
    for module in model.modules():
        for guarded in guards if _has_dtensors(module.parameters()) else ():
            if callable(getattr(type(module), guarded.name, None)):
                module.__dict__[guarded.name] = MethodType(guarded, module)


def _has_dtensors(values: Iterable[Any]) -> bool:
    return any(isinstance(value, DTensor) for value in values)


@dataclass(frozen=True, eq=False)
class _Guarded:
    """A method behind its rule; a module binds it, because the compiler and copies expect a bound method."""

    name: str
    rule: Callable[..., Any]

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return self.rule(module, partial(getattr(type(module), self.name), module), *args, **kwargs)


def _error(name: str, module: nn.Module, reason: str) -> ModelError:
    return ModelError(f"{name} of a parallelized {type(module).__name__}: {reason}")


def _refuse(name: str, reason: str, module: nn.Module, method: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise _error(name, module, reason)


def _save_pretrained(module: nn.Module, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Allow a ``state_dict`` of full tensors: some trainers gather it."""
    state_dict = kwargs.get("state_dict")
    if state_dict is None or _has_dtensors(state_dict.values()):
        save = _SAVE_ADAPTER if hasattr(module, "peft_config") else _SAVE
        raise _error("save_pretrained", module, f"it would write one rank's shards: {save}")
    return method(*args, **kwargs)


def _resize(module: Any, method: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Allow a call that does not change the number of embeddings."""
    if new_num_tokens not in (None, module.get_input_embeddings().weight.shape[0]):
        raise _error("resize_token_embeddings", module, _RESIZE)
    return method(new_num_tokens, *args, **kwargs)


def _load_state_dict(
    module: nn.Module, method: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """Copy this rank's shards of full tensors; every rank passes the same tensors."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shards: Any = copy(state_dict)  # with its attributes, such as the versions of modules
    for name, value in state_dict.items():
        shards[name] = _shard_like(value, parameters.get(name))
    if assign and any(shards[name] is not value for name, value in state_dict.items()):
        raise _error("load_state_dict", module, _ASSIGN)
    return method(shards, strict, assign)


def _shard_like(value: Any, parameter: Any) -> Any:
    """Return a full tensor as a DTensor like a parameter, and any other value unchanged."""
    is_full = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not is_full or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return DTensor.from_local(
        value[slices_of(dtensor_box(parameter))].to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _convert(module: nn.Module, method: Any, *args: Any, **kwargs: Any) -> Any:
    """``to``, ``half``, ``float``, …: converted DTensors keep the user's hooks and attributes."""
    with carry_over_parameters(module, recurse=False):
        return method(*args, **kwargs)


def _named_parameters(module: nn.Module, method: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """``named_parameters``, also called by ``parameters``: yield shards instead of gathered copies."""
    shards = shards_of_copies()
    for path, parameter in method(*args, **kwargs):
        yield path, shards.get(parameter, parameter)


def _merge(module: nn.Module, method: Any, *args: Any, **kwargs: Any) -> Any:
    if not all(map(_merges, module.modules())):
        raise _error("merge", module, _UNMERGED)
    return _unmerge(module, method, *args, **kwargs)


def _merges(layer: Any) -> bool:
    """Return whether peft can add adapters to a layer's weight: plain LoRA, with factors sharded like the weight."""
    if not hasattr(layer, "base_layer"):
        return True
    meshes = {getattr(parameter, "device_mesh", None) for parameter in layer.parameters() if parameter.ndim > 1}
    return len(meshes) < 2 and not (meshes - {None} and getattr(layer, "lora_variant", None))


def _unmerge(module: nn.Module, method: Any, *args: Any, **kwargs: Any) -> Any:
    if not free_copies(module):
        raise _error("merge or unmerge", module, _MERGE)
    return method(*args, **kwargs)


@dataclass(frozen=True)
class _Constructor:
    """The constructor of a copy: ``copy`` calls it, and ``pickle`` asks for its name and gets an error."""

    kind: str
    function: Any

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError(f"a parallelized {self.kind} cannot be pickled: its tensors are one rank's shards; {_SAVE}")


def _reduce(module: nn.Module, method: Any, protocol: Any) -> tuple[Any, ...]:
    constructor, *parts = method(max(int(protocol), 2))
    return (_Constructor(type(module).__name__, constructor), *parts)


#: The rule of each method.
RULES: dict[str, Callable[..., Any]] = {
    **{name: partial(_refuse, name, reason) for name, reason in _REFUSED.items()},
    "save_pretrained": _save_pretrained,
    "resize_token_embeddings": _resize,
    "load_state_dict": _load_state_dict,
    "_apply": _convert,
    **dict.fromkeys(("merge", "merge_adapter", "merge_and_unload"), _merge),
    "unmerge": _unmerge,
    "named_parameters": _named_parameters,
    "__reduce_ex__": _reduce,
}


#: The number of plain parameters of an optimizer that had equal, nonzero gradients on every rank.
_compared: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
#: Parallelized models.
_models: WeakSet[nn.Module] = WeakSet()
#: Reductions in another order change a tensor by less than this, relative to its largest element.
_TOLERANCE = 1e-3
#: The attribute of an optimizer with its undivided groups during a step.
_GROUPS = "_fsdp_runtime_groups"


def watch_optimizers(model: nn.Module) -> None:
    """Check the steps of every optimizer, and divide its groups by mesh."""
    _models.add(model)
    _watch()


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_restore)
    register_optimizer_step_post_hook(after_step)


@torch.no_grad()
def _before(optimizer: Optimizer, *_: Any) -> None:
    _restore(optimizer)  # after a step that raised
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shards = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    plain = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    if replaced := [path for parameter in parameters if (path := getattr(parameter, _REPLACED, None)) is not None]:
        raise ModelError(
            f"this {type(optimizer).__name__} holds {len(replaced)} parameters that parallelize has replaced by shards "
            f"({replaced[0]} first), so its step would change nothing: build the optimizer after parallelize, from "
            "model.parameters()"
        )
    if on_meta := sum(parameter.is_meta for parameter in shards):
        raise ModelError(
            f"{on_meta} of the {len(parameters)} parameters of this {type(optimizer).__name__} are on the meta device, "
            "so its step would change nothing: call load_weights(model, checkpoint), or materialize(model) and "
            "set initial values"
        )
    for parameter in plain:
        if isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.full_tensor()
    if plain and dist.is_initialized() and _compared.get(optimizer) != len(plain):
        beside = [parameter for model in models_with(plain) for parameter in model.parameters()]
        _compare(optimizer, plain, shards or [parameter for parameter in beside if isinstance(parameter, DTensor)])
    # Optimizers of other packages may write to their groups, as schedule-free optimizers do; a division loses this.
    if type(optimizer).__module__.startswith("torch.optim."):
        groups = optimizer.param_groups
        parts = [part for group in groups for part in _parts(group)]
        if len(parts) > len(groups):
            optimizer.__dict__[_GROUPS], optimizer.param_groups = groups, parts


def models_with(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Return the parallelized models that contain one of the parameters."""
    ids = {*map(id, parameters)}
    return [model for model in _models if any(id(parameter) in ids for parameter in model.parameters())]


def _compare(optimizer: Optimizer, plain: Sequence[Tensor], shards: Sequence[DTensor]) -> None:
    """Compare plain parameters and their gradients over the ranks, until a step has nonzero gradients."""
    meshes = dict.fromkeys(shard.device_mesh for shard in shards)
    groups = {axis: mesh.get_group(axis) for mesh in meshes for axis in mesh.mesh_dim_names or ()}
    groups = {a: g for a, g in groups.items() if dist.get_world_size(g) > 1 and dist.get_backend(g) != "fake"}
    trained = [parameter for parameter in plain if parameter.requires_grad]
    if not groups or not trained:
        return
    device = next(iter(meshes)).device_type
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    for name, tensors, cause, fix in (
        ("values", trained, "drawn per rank", "draw it after the same seed on every rank, as torch.manual_seed(0)"),
        ("gradients", gradients, "as they are not reduced", "average their gradients over the ranks before the step"),
    ):
        if different := [tensor for tensor in tensors if _differs(tensor, groups, device)]:
            raise ModelError(
                f"{len(different)} of {len(trained)} plain parameters of this {type(optimizer).__name__} "
                f"(first of shape {tuple(different[0].shape)}) have different {name} on the ranks of "
                f"{', '.join(groups)}, {cause}: put their module into the model before parallelize, or {fix}"
            )
    if any(bool(gradient.any()) for gradient in gradients):
        _compared[optimizer] = len(plain)


def _differs(tensor: Tensor, groups: Mapping[str, ProcessGroup], device: str) -> bool:
    """Return whether a tensor differs between ranks by more than the rounding of a reduction.  Collective."""
    values = tensor.detach().to(device, torch.float32)
    bounds = torch.stack([values, -values])
    for group in groups.values():
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    tolerance = max(_TOLERANCE, 4 * torch.finfo(tensor.dtype).eps)
    return bool(bounds.sum(0).max() > tolerance * bounds.abs().max())


def _restore(optimizer: Optimizer, *_: Any) -> None:
    if (groups := optimizer.__dict__.pop(_GROUPS, None)) is not None:
        optimizer.param_groups = groups


def _parts(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a group, or its parts by mesh if one call would take all its tensors."""
    by_mesh: dict[Any, list[Any]] = {}
    if group.get("fused") or group.get("foreach"):
        for parameter in group["params"]:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(by_mesh) < 2:
        yield group
    else:
        yield from ({**group, "params": parameters} for parameters in by_mesh.values())


#: The attribute with a replaced parameter's path.  torch refuses to swap tensors with weak references, and a strong
#: reference would keep the memory.
_REPLACED = "_fsdp_runtime_replaced"


@contextmanager
def carry_over_parameters(model: nn.Module, *, recurse: bool = True) -> Iterator[None]:
    """Carry attributes and hooks over to parameters that are replaced inside the ``with``."""
    # A hook of ``register_post_accumulate_grad_hook`` gets the new parameter with its complete gradient. A hook of
    # ``register_hook`` gets the gradient as a DTensor; FSDP2 does not run it, so it is refused earlier.
    attached = {}
    for path, parameter in model.named_parameters(recurse=recurse):
        attached[path] = dict(vars(parameter)), parameter_hooks(parameter)
        setattr(parameter, _REPLACED, path)
    try:
        yield
    finally:
        for parameter in model.parameters(recurse=recurse):
            parameter.__dict__.pop(_REPLACED, None)
    for path, parameter in model.named_parameters(recurse=recurse):
        attributes, hooks = attached.get(path, ({}, (None, None)))
        vars(parameter).update({**attributes, **vars(parameter)})
        set_parameter_hooks(parameter, hooks)
