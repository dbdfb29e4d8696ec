"""Methods of a parallelized model that would read one rank's shards, or change what only ``parallelize`` can change.

``RULES`` has one line for each method.  A rule stands in front of the method of every sharded module whose class has
it; it calls the method, or raises before anything changed.  Methods without a rule are right as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import own_parameters, parameter_hooks, set_parameter_hooks
from fsdp_runtime.errors import ModelError
from fsdp_runtime.memory.gathered_copies import drop_unreduced, shards_of_copies

#: A rule: the module, its method's name and the method, then the arguments of the call.
Rule = Callable[..., Any]

_SAVE = "write a checkpoint with save_weights(model, directory), or torch.save this rank's model.state_dict()"
_ADAPTERS = "add adapters before parallelize; load_adapter(model, directory) loads the weights of one"


def guard_methods(model: nn.Module) -> None:
    """Put the rules in front of the methods of every sharded module.

    Args:
        model: a parallelized model; modules without DTensors do not change.
    """
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


def _refuse(module: nn.Module, name: str, fix: str) -> NoReturn:
    raise ModelError(f"{name} of a parallelized {type(module).__name__}: {fix}")


def _refused(fix: str) -> Rule:
    def rule(module: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(module, name, fix)

    return rule


def _save_pretrained(module: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass a ``state_dict`` of plain tensors on, as of trainers that gather by themselves."""
    given = kwargs.get("state_dict")
    if given is None or _has_dtensors(given.values()):
        _refuse(module, name, f"it would write one rank's shards: {_SAVE}")
    return method(*args, **kwargs)


def _resize(module: Any, name: str, method: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Pass a call on that only asks for the embeddings."""
    if new_num_tokens not in (None, module.get_input_embeddings().weight.shape[0]):
        _refuse(module, name, "its vocabulary is sharded; resize it before parallelize")
    return method(new_num_tokens, *args, **kwargs)


def _replaces_module(module: Any, name: str, method: Any, value: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if value not in module.modules():
        _refuse(module, name, "the new module would not be sharded; replace modules before parallelize")
    return method(value, *args, **kwargs)


def _load_state_dict(
    module: nn.Module, name: str, method: Any, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    wanted = dict(module.named_parameters(remove_duplicate=False))
    plain = [key for key, value in state_dict.items() if isinstance(wanted.get(key), DTensor) and _is_plain(value)]
    if plain:
        _refuse(
            module,
            name,
            f"{len(plain)} tensors are full where the model has shards, first {plain[0]}: use load_weights(model, "
            "directory), or set_model_state_dict of torch.distributed.checkpoint.state_dict with full_state_dict=True",
        )
    return method(state_dict, *args, **kwargs)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _convert(module: nn.Module, name: str, method: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """``to``, ``half``, ``float``, …: DTensors get new contents, without the hooks and attributes of users."""
    parameters = {key: value for key, value in own_parameters(module).items() if value is not None}
    if isinstance(module, FSDPModule):
        _refuse_other_dtype(module, function)
    attached = {key: (dict(vars(value)), parameter_hooks(value)) for key, value in parameters.items()}
    converted = method(function, *args, **kwargs)
    for key, (attributes, hooks) in attached.items():
        parameter = own_parameters(module)[key]
        vars(parameter).update({**attributes, **vars(parameter)})
        set_parameter_hooks(parameter, hooks)
    return converted


def _refuse_other_dtype(module: nn.Module, function: Any) -> None:
    """Refuse a conversion under FSDP2, which has allocated buffers and chosen dtypes by that of the shards."""
    for dtype in {parameter.dtype for parameter in module.parameters()}:
        wanted = function(torch.empty(0, dtype=dtype)).dtype
        if wanted != dtype:
            _refuse(
                module,
                "a conversion",
                f"from {dtype} to {wanted} after FSDP2 has chosen its dtypes: convert the model before parallelize, or "
                "give FSDPOptions(mp_policy=..., master_dtype=...)",
            )


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


def _unload(module: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave out the ``PeftModel``, which is the root of FSDP2; without FSDP2 nothing hangs on it."""
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        _refuse(module, name, "FSDP2 gathers parameters in the forward of the PeftModel: call merge_adapter() instead")
    return method(*args, **kwargs)


def _deepcopy(module: nn.Module, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse(module, "a copy", f"FSDP2 cannot copy a model: parallelize a copy of the plain one; {_SAVE}")


#: What stands in front of each method.
RULES: dict[str, Rule] = {
    "save_pretrained": _save_pretrained,
    "push_to_hub": _refused(f"it would write one rank's shards: {_SAVE}"),
    "resize_token_embeddings": _resize,
    "set_input_embeddings": _replaces_module,
    "set_output_embeddings": _replaces_module,
    "set_decoder": _replaces_module,
    "set_encoder": _replaces_module,
    "add_adapter": _refused(_ADAPTERS),
    "load_adapter": _refused(_ADAPTERS),
    "add_weighted_adapter": _refused(_ADAPTERS),
    "inject_adapter": _refused(_ADAPTERS),
    "merge_and_unload": _unload,
    "unload": _unload,
    "load_state_dict": _load_state_dict,
    "_apply": _convert,
    "share_memory": _refused("memory of DTensors cannot be shared; share the plain model's"),
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
