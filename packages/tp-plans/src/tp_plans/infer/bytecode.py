"""Facts about a module's forward, read from its bytecode."""

from __future__ import annotations

from collections.abc import Iterator
from dis import Instruction, get_instructions
from inspect import signature
from types import CodeType
from typing import Any

from tp_plans._validate import is_integer
from tp_plans.module_attrs import getattr_path
from tp_plans.naming import COUNT, NO_COUNT

#: Elementwise operations, which give the same on a local shard of the features as on all.
_FEATURE_BY_FEATURE = {
    *("chunk", "split", "unbind", "clamp", "mul", "add", "pow", "square", "exp", "sqrt", "abs", "neg"),
    *("relu", "relu2", "gelu", "silu", "swish", "sigmoid", "tanh", "softplus", "dropout"),
    *("torch", "nn", "functional", "F", "training", "p", "float", "to", "dtype", "type", "type_as", "min", "max"),
    *("isinstance", "weight", "Tensor", "int8"),  # a cast to the dtype of a layer's weight
}
#: Attributes of a tensor that do not read its values.
_NO_VALUES = ("dtype", "device", "shape", "size", "ndim")


def non_elementwise_op(module: Any, children: set[str]) -> str | None:
    """Return a name that a module's code reads and that may not be elementwise; ``None`` if all are."""
    known = _FEATURE_BY_FEATURE | children | {name for name, value in vars(module).items() if is_plain(value)}
    return next(iter(sorted(referenced_names(type(module)) - known)), None)


def is_plain(value: object) -> bool:
    """Return whether an attribute is a number or string, which computes nothing."""
    return value is None or isinstance(value, (bool, int, float, str))


def first_argument(module: Any) -> str:
    """Return the name of the first argument of a module's forward."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    names = code.co_varnames[1 : code.co_argcount] if code is not None else ()
    return names[0] if names else "hidden_states"


def takes_argument(module: Any, name: str) -> bool:
    """Return whether a module's forward declares an argument of this name, wrapped functions included."""
    forward = getattr(type(module), "forward", None)
    return forward is not None and name in signature(forward).parameters


def counts_used(module: Any, values: set[int]) -> tuple[str, ...]:
    """Return the integer attributes, its config's included, that a module's code reads with one of ``values``."""
    read = referenced_names(type(module))
    own = [name for name in vars(module) if name in read and _counts(name, getattr(module, name), values)]
    config = getattr(module, "config", None) if "config" in read else None
    shared = [
        f"config.{name}"
        for name in sorted(read - set(own))
        if config is not None and _counts(name, getattr_path(config, name), values)
    ]
    return (*own, *shared)


def referenced_names(cls: type) -> set[str]:
    """Return the names that the methods of a class read: attributes, functions and modules."""
    return {name for method in _methods(cls) for code in _with_nested(method) for name in code.co_names}


def reads_weights(cls: type) -> bool:
    """Return whether the methods of a class read weights of layers, for more than their dtype, device or class."""
    return any(
        read.argval == "weight"
        and read.opname.startswith("LOAD")
        and "CONST" not in read.opname
        and after[0] not in ("dtype", "device")
        and after != ["torch", "Tensor"]
        for _, read, after in _in_context(cls)
    )


def reads_below(cls: type, child: str, name: str) -> bool:
    """Return whether the methods of a class read a tensor of a module below, as ``self.child.name``."""
    # What reads no more than its dtype, device or shape does not count.
    return any(
        [before.argval, read.argval] == [child, name] and after[0] not in _NO_VALUES
        for before, read, after in _in_context(cls)
    )


def _in_context(cls: type) -> Iterator[tuple[Instruction, Instruction, list[Any]]]:
    """Iterate over a class's instructions, each with the instruction before it and the arguments of the next two."""
    for code in _methods(cls):
        for nested in _with_nested(code):
            steps = [step for step in get_instructions(nested) if step.opname not in ("CACHE", "EXTENDED_ARG")]
            for index in range(1, len(steps) - 1):
                yield steps[index - 1], steps[index], [step.argval for step in steps[index + 1 : index + 3]]


def _methods(cls: type) -> Iterator[CodeType]:
    """Iterate over the code of a class's methods, inherited ones included, without general base classes."""
    for base in cls.__mro__:
        if base.__name__ in ("Module", "PreTrainedModel"):
            return
        for name, method in vars(base).items():
            while hasattr(method, "__wrapped__"):
                method = method.__wrapped__
            code = getattr(method, "__code__", None)
            if name not in ("__init__", "_init_weights") and isinstance(code, CodeType):
                yield code


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    """Iterate over the code of a function and of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


def _counts(name: str, value: object, values: set[int]) -> bool:
    counted = is_integer(value, least=2) and value in values
    return counted and bool(COUNT.search(name)) and not NO_COUNT.search(name)
