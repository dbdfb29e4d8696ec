"""Methods of a parallelized model that would read one rank's shards, or change what only ``parallelize`` can change.

``RULES`` has one line for each method.  A rule stands in front of the method of every sharded module whose class has
it; it calls the method, or raises before anything changed.  Methods without a rule are right as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import own_parameters, parameter_hooks, set_parameter_hooks
from fsdp_runtime.errors import ModelError
from fsdp_runtime.memory.gathered_copies import (
    drop_unreduced,
    free_copies,
    gathered_by,
    leave_out_peft_model,
    shards_of_copies,
)
from fsdp_runtime.sharded.shard_offsets import dtensor_slices

#: A rule: the module, its method's name and the method, then the arguments of the call.
Rule = Callable[..., Any]

_SAVE = "write a checkpoint with save_weights(model, directory), or torch.save this rank's model.state_dict()"
#: What a call of each method is refused with.
_FIXES = {
    **dict.fromkeys(
        ("save_pretrained", "push_to_hub", "save_distributed_checkpoint"), f"it would write one rank's shards: {_SAVE}"
    ),
    **dict.fromkeys(
        ("resize_token_embeddings", "resize_position_embeddings"),
        "embeddings are sharded, and optimizers hold them; resize it before parallelize",
    ),
    **dict.fromkeys(
        ("set_input_embeddings", "set_output_embeddings", "set_decoder", "set_encoder"),
        "the new module would not be sharded; replace modules before parallelize",
    ),
    **dict.fromkeys(
        ("add_adapter", "load_adapter", "add_weighted_adapter", "inject_adapter"),
        "add adapters before parallelize; load_adapter(model, directory) loads the weights of one",
    ),
    **dict.fromkeys(
        ("merge", "unmerge"),
        "FSDP2 drops what is written to gathered weights, in a forward or inside of 'with unsharded(model)': call "
        "merge_adapter() or unmerge_adapter() before, the latter also before 'with model.disable_adapter()'",
    ),
    "merge_adapter": "its adapters are no plain LoRA, or their factors are not sharded as the weight is: "
    "save_weights(model, directory) writes merged weights",
    "load_state_dict": "full tensors with assign=True would take the places of shards: leave assign out",
    "a conversion": "FSDP2 has chosen its dtypes: convert it before parallelize, or give "
    "FSDP2(mp_policy=..., master_dtype=...)",
    "share_memory": "memory of DTensors cannot be shared; share the plain model's",
    "maybe_distribute_model": "its layers are distributed already: leave it out",
    "set_use_kernels": "kernels would replace the forwards of layers that are sharded: leave it out",
    "a copy": f"FSDP2 cannot copy a model: parallelize a copy of the plain one; {_SAVE}",
}


def guard_methods(model: nn.Module) -> None:
    """Put the rules in front of the methods of every module with DTensors."""
    guards = [_Guarded(name, rule) for name, rule in RULES.items()]
    for module in model.modules():
        if not _has_dtensors(module.parameters()):
            continue
        module.__dict__["__reduce_ex__"] = _Reduce(module)
        for guarded in guards:
            if callable(getattr(type(module), guarded.name, None)):
                module.__dict__[guarded.name] = MethodType(guarded, module)


def _has_dtensors(values: Iterable[Any]) -> bool:
    return any(isinstance(value, DTensor) for value in values)


@dataclass(frozen=True, eq=False)
class _Guarded:
    """A method behind its rule; bound to a module, as the compiler and copies expect of a method."""

    name: str
    rule: Rule

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return self.rule(module, self.name, partial(getattr(type(module), self.name), module), *args, **kwargs)


def _refuse(module: nn.Module, called: str) -> None:
    for name, fix in _FIXES.items():
        if name == called:
            raise ModelError(f"{name} of a parallelized {type(module).__name__}: {fix}")


def _refused(module: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any) -> None:
    _refuse(module, name)


def _save_pretrained(module: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass a ``state_dict`` of plain tensors on, as of trainers that gather by themselves."""
    given = kwargs.get("state_dict")
    if given is None or _has_dtensors(given.values()):
        _refuse(module, name)
    return method(*args, **kwargs)


def _resize(module: Any, name: str, method: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Pass a call on that only asks for the embeddings."""
    if new_num_tokens not in (None, module.get_input_embeddings().weight.shape[0]):
        _refuse(module, name)
    return method(new_num_tokens, *args, **kwargs)


def _replaces_module(module: Any, name: str, method: Any, value: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if value not in module.modules():
        _refuse(module, name)
    return method(value, *args, **kwargs)


def _load_state_dict(
    module: nn.Module, name: str, method: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """Copy this rank's parts of full tensors, which every rank is given."""
    wanted = dict(module.named_parameters(remove_duplicate=False))
    parts: Any = copy(state_dict)  # with its attributes, as the versions of modules
    for key, value in state_dict.items():
        parts[key] = _own_part(value, wanted.get(key))
    if assign and any(parts[key] is not value for key, value in state_dict.items()):
        _refuse(module, name)
    return method(parts, strict, assign)


def _own_part(value: Any, wanted: Any) -> Any:
    """Return a full tensor as a DTensor like ``wanted``; anything else as it is."""
    is_full = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not is_full or not isinstance(wanted, DTensor) or value.shape != wanted.shape:
        return value
    own = value[dtensor_slices(wanted)].to(wanted.device)
    return DTensor.from_local(
        own, wanted.device_mesh, wanted.placements, shape=wanted.shape, stride=wanted.stride(), run_check=False
    )


def _convert(module: nn.Module, name: str, method: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """``to``, ``half``, ``float``, …: DTensors get new contents, without the hooks and attributes of users."""
    parameters = {key: value for key, value in own_parameters(module).items() if value is not None}
    if gathered_by(module) and _changes_dtype(module, function):
        _refuse(module, "a conversion")
    attached = {key: (dict(vars(value)), parameter_hooks(value)) for key, value in parameters.items()}
    converted = method(function, *args, **kwargs)
    for key, (attributes, hooks) in attached.items():
        parameter = own_parameters(module)[key]
        vars(parameter).update({**attributes, **vars(parameter)})
        set_parameter_hooks(parameter, hooks)
    return converted


def _changes_dtype(module: nn.Module, function: Any) -> bool:
    """Return whether a conversion changes a dtype, by which FSDP2 has allocated its buffers."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return any(function(torch.empty(0, dtype=dtype)).dtype != dtype for dtype in dtypes)


def _named_parameters(
    module: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, nn.Parameter]]:
    """``named_parameters``, which ``parameters`` calls: shards in the place of gathered copies."""
    shards = shards_of_copies(module)
    for path, parameter in method(*args, **kwargs):
        yield path, shards.get(parameter, parameter)


def _zero_grad(module: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any) -> None:
    method(*args, **kwargs)
    drop_unreduced(module)


def _merge(module: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Merge into shards, not into the copies that a forward has gathered, and nothing where one layer cannot."""
    if name.startswith("merge") and not all(map(_merges, module.modules())):
        _refuse(module, "merge_adapter")
    if not free_copies(module):
        _refuse(module, "merge")
    return method(*args, **kwargs)


def _merges(layer: Any) -> bool:
    """Return whether peft can add a layer's adapters to its weight: plain LoRA, with factors that lie as it."""
    if not hasattr(layer, "base_layer"):
        return True
    meshes = {getattr(each, "device_mesh", None) for each in layer.parameters() if each.ndim > 1}
    return len(meshes) < 2 and not (meshes - {None} and getattr(layer, "lora_variant", None))


def _unload(module: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    """``unload`` and ``merge_and_unload``, which leave out the ``PeftModel``: the root of FSDP2 is the model inside."""
    merging = partial(_merge, module, name, partial(method, *args, **kwargs))
    return leave_out_peft_model(module, merging)


def _deepcopy(module: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any) -> None:
    _refuse(module, "a copy")


#: What stands in front of each method.
RULES: dict[str, Rule] = {
    **dict.fromkeys(_FIXES, _refused),
    "save_pretrained": _save_pretrained,
    "resize_token_embeddings": _resize,
    **dict.fromkeys(("set_input_embeddings", "set_output_embeddings", "set_decoder", "set_encoder"), _replaces_module),
    "load_state_dict": _load_state_dict,
    "_apply": _convert,
    "merge": _merge,
    "unmerge": _merge,
    "merge_adapter": _merge,
    "merge_and_unload": _unload,
    "unload": _unload,
    "named_parameters": _named_parameters,
    "zero_grad": _zero_grad,
    "__deepcopy__": _deepcopy,  # of FSDP modules alone
}


@dataclass(frozen=True, eq=False)
class _Reduce:
    """``__reduce_ex__`` of one module: copies are built as usual, and pickles of the constructor are refused."""

    module: nn.Module

    def __call__(self, protocol: Any) -> tuple[Any, ...]:
        reduced = object.__reduce_ex__(self.module, max(int(protocol), 2))  # (constructor, arguments, state, ...)
        return (_Constructor(type(self.module).__name__, reduced[0]), *reduced[1:])


@dataclass(frozen=True)
class _Constructor:
    """A function that builds a copy; ``copy`` calls it, and ``pickle`` asks for its name, which raises."""

    kind: str
    function: Any

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError(f"a parallelized {self.kind} cannot be pickled: its tensors are one rank's shards; {_SAVE}")
