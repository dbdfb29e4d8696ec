"""Check the types of arguments against a function's annotations, so that its body need not."""

from __future__ import annotations

import functools
import inspect
import numbers
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast

import torch

from rl_logprobs.errors import DtypeError, OptionError

Target = TypeVar("Target", bound=Callable[..., Any])
Test = Callable[[Any], bool]
#: An exception's class, or what makes one of a message.
Refusal = Callable[[str], Exception]

_NUMBERS = {int: numbers.Integral, float: numbers.Real}


def argument_types(error: Refusal, special: Mapping[type, Refusal] | None = None) -> Callable[[Target], Target]:
    """Return a decorator for functions, and for classes, whose arguments must have the annotated types.

    Numbers of any library are taken for ``int`` and ``float``, but no booleans and no integers beyond 64 bits.  A
    tensor must be dense.  Of a ``Literal`` only the type is checked.  The elements of sequences and mappings are
    checked, those of other iterables are not.

    Args:
        error: what is raised, with a message that names the function, the argument and its annotation.
        special: what is raised instead where the annotation names a class.

    Returns:
        The decorator; a class is changed in place.

    Example:
        >>> from collections.abc import Sequence
        >>> from rl_logprobs.argument_types import argument_types
        >>> @argument_types(ValueError)
        ... def total(values: Sequence[int]) -> int:
        ...     return sum(values)
        >>> total([1, "2"])
        Traceback (most recent call last):
        ...
        ValueError: total: values is of type list, not Sequence[int]
    """

    def decorate(target: Target) -> Target:
        if isinstance(target, type):
            cls: Any = target
            cls.__init__ = _checked(cls.__init__, cls.__name__, cls.__module__, error, special)
            return target
        name = target.__qualname__.removesuffix(".__init__")
        return cast(Target, _checked(target, name, target.__module__, error, special))

    return decorate


def _checked(
    function: Callable[..., Any],
    name: str,
    module: str,
    error: Refusal,
    special: Mapping[type, Refusal] | None,
) -> Callable[..., Any]:
    names = vars(sys.modules[module])
    tests: dict[str, Test] = {}
    annotations: dict[str, Any] = {}
    order: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            order.append(parameter.name)
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and parameter.name not in (
            "self",
            "cls",
        ):
            owner = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
            annotations |= typing.get_type_hints(owner, names)
            tests[parameter.name] = _test(annotations[parameter.name])

    def refusal(key: str, value: Any) -> Exception:
        annotation = annotations[key]
        kinds = [annotation, *typing.get_args(annotation)]
        raised = next((each for cls, each in (special or {}).items() if cls in kinds), error)
        shown = type(value).__qualname__
        shown += f" of layout {value.layout}" if isinstance(value, torch.Tensor) else ""
        shown += " (beyond 64 bits)" * _is_long(value)
        written = inspect.signature(function).parameters[key].annotation
        return raised(f"{name}: {key} is of type {shown}, not {written}")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # the compiler's numbers are symbols
            for key, value in (*zip(order, args, strict=False), *kwargs.items()):
                if key in tests and not tests[key](value):
                    raise refusal(key, value)
        return function(*args, **kwargs)

    return checked


def _test(annotation: Any) -> Test:
    """Return the test of a value for an annotation."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (Any, object):
        return lambda value: True
    if origin in (Union, types.UnionType):
        tests = [_test(each) for each in inner]
        return lambda value: any(test(value) for test in tests)
    if origin is Literal:
        allowed = tuple({type(each) for each in inner})
        return lambda value: isinstance(value, allowed)
    if annotation in _NUMBERS:
        number = _NUMBERS[annotation]
        return lambda value: type(value) is not bool and isinstance(value, number) and not _is_long(value)
    if origin is tuple and inner[-1] is not ...:
        parts = [_test(each) for each in inner]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(parts)
            and all(part(each) for part, each in zip(parts, value, strict=True))
        )
    cls = origin or annotation
    if cls is Callable:
        return callable
    return _test_elements(cls, [_test(each) for each in inner if each is not ...]) if inner else _instance(cls)


def _test_elements(cls: Any, inner: list[Test]) -> Test:
    is_one = _instance(cls)
    if issubclass(cls, Mapping):
        key, item = inner
        return lambda value: is_one(value) and all(key(name) and item(each) for name, each in value.items())
    if issubclass(cls, Sequence):
        (item,) = inner
        return lambda value: is_one(value) and not isinstance(value, (str, bytes)) and all(map(item, value))
    if cls is Iterable:
        return lambda value: is_one(value) and not isinstance(value, (str, bytes)) and not hasattr(value, "ndim")
    return is_one


def _instance(cls: Any) -> Test:
    if cls is torch.Tensor:
        return lambda value: isinstance(value, cls) and value.layout is torch.strided
    return lambda value: isinstance(value, cls)


def _is_long(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not -(2**63) <= int(value) < 2**63


#: For every public function: wrong types are refused before its body runs.
checked = argument_types(OptionError, {torch.Tensor: DtypeError})
