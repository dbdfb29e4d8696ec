"""Methods of a parallelized model that would read one rank's shards or replace them.

``RULES`` has one entry per method.  A rule runs before the method of every module with shards.  It calls the method, or
raises before anything changes.  Other methods are correct without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime.errors import ModelError
from fsdp_runtime.memory.gathered_copies import free_copies, shards_of_copies
from fsdp_runtime.sharded.chunks import slices_of
from fsdp_runtime.sharded.shard_offsets import dtensor_box
from fsdp_runtime.steps.guards.replaced_parameters import carry_over_parameters

_SAVE = "write a checkpoint with save_weights(model, directory), or torch.save this rank's model.state_dict()"
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
        raise _error("save_pretrained", module, f"it would write one rank's shards: {_SAVE}")
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
