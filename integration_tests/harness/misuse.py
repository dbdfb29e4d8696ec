"""Calls with wrong arguments, generated: each must return, or raise an error that was meant for its user.

``valid`` of a call returns the arguments of a right one; one or two of them are replaced by values of another type,
shape, dtype or device.  An error is meant for the user if it is one of the package's, or a TypeError or ValueError that
the package's own code raises and that names an argument.  For an argument of a wrong type, a ValueError, TypeError,
AttributeError or KeyError (of a mapping for a sequence) will do wherever it is raised, and torch's RuntimeError of a
tensor for another value, in a container too: types are for type checkers.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

#: No wrong call may take longer.
LIMIT_SECONDS = 20

#: Values that are wrong for most arguments, made anew for each call.
ODD_VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "3": lambda: 3,
    "10**30": lambda: 10**30,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "-inf": lambda: -math.inf,
    "''": lambda: "",
    "'nonsense'": lambda: "nonsense",
    "'a.b c'": lambda: "a.b c",
    "NUL": lambda: "a\0b",
    "bytes": lambda: b"bytes",
    "()": lambda: (),
    "(1, None)": lambda: (1, None),
    "['a', 'b']": lambda: ["a", "b"],
    "{}": dict,
    "{1: 2}": lambda: {1: 2},
    "{'a': None}": lambda: {"a": None},
    "object()": object,
    "int": lambda: int,
    "function": lambda: _function_of_three,
    "exhausted": lambda: iter(()),
    "dtype": lambda: torch.float16,
    "meta device": lambda: torch.device("meta"),
    "missing path": lambda: Path("missing") / "folder",
    "layer": lambda: nn.Linear(2, 3),
    "parameters": lambda: nn.Linear(2, 3).parameters(),
    "float tensor": lambda: torch.ones(2, 3),
    "int tensor": lambda: torch.ones(2, 3, dtype=torch.int64),
    "bool tensor": lambda: torch.ones(3, dtype=torch.bool),
    "complex tensor": lambda: torch.ones(2, 3, dtype=torch.complex64),
    "0-d tensor": lambda: torch.tensor(2.0),
    "empty tensor": lambda: torch.empty(0),
    "meta tensor": lambda: torch.ones(2, 3, device="meta"),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "list of tensors": lambda: [torch.ones(2), torch.ones(3)],
}

#: Changes of a tensor that was right.
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "on meta": lambda tensor: tensor.to("meta"),
    "as bfloat16": lambda tensor: tensor.to(torch.bfloat16),
    "as int32": lambda tensor: tensor.to(torch.int32),
    "as complex": lambda tensor: tensor.to(torch.complex64),
    "as bool": lambda tensor: tensor.bool(),
    "one dim more": lambda tensor: tensor.unsqueeze(0),
    "one dim less": lambda tensor: tensor.select(0, 0) if tensor.dim() else tensor,
    "without its last": lambda tensor: tensor[..., :-1] if tensor.dim() else tensor,
    "without elements": lambda tensor: tensor.new_empty((0, *tensor.shape[1:])),
    "transposed": lambda tensor: tensor.mT if tensor.dim() >= 2 else tensor,
    "a leaf with gradient": lambda tensor: tensor.double().requires_grad_(),
    "as list": lambda tensor: tensor.tolist(),
}


def _function_of_three(first: Any, second: Any, third: Any) -> Any:
    return first, second, third


@dataclass(frozen=True)
class Call:
    """A public function, the arguments of a right call, and the parameters that keep their right values."""

    function: Callable[..., Any]
    valid: Callable[[], dict[str, Any]] = field(default=dict)
    keep: tuple[str, ...] = ()

    @property
    def parameters(self) -> list[str]:
        """The names that are varied."""
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found = inspect.signature(self.function).parameters.values()
        return [each.name for each in found if each.kind not in kinds and each.name not in self.keep]


Change = tuple[str, str]


def wrong_arguments(call: Call) -> st.SearchStrategy[tuple[Change, ...]]:
    """Return the strategy of one or two changes, each a parameter and the key of a value or of a tensor's change."""
    names = call.parameters
    change = st.tuples(st.sampled_from(names), st.sampled_from([*ODD_VALUES, *CHANGES]))
    return st.lists(change, min_size=1, max_size=min(2, len(names)), unique_by=lambda one: one[0]).map(tuple)


def arguments(call: Call, changes: tuple[Change, ...]) -> dict[str, Any]:
    """Return the arguments of the right call with the changes."""
    values = call.valid()
    for name, key in changes:
        if key in ODD_VALUES:
            values[name] = ODD_VALUES[key]()
        elif isinstance(values.get(name), Tensor):
            with contextlib.suppress(NotImplementedError):
                values[name] = CHANGES[key](values[name])
    return values


def complaint(call: Call, changes: tuple[Change, ...], package: ModuleType, *errors: type[Exception]) -> str | None:
    """Return what is wrong with the outcome of a call, None where it returned or refused as it should.

    Args:
        call: the call.
        changes: its wrong arguments.
        package: whose code may raise TypeError and ValueError.
        errors: base classes of the errors that are meant for users.
    """
    values = arguments(call, changes)
    models = {name: (value, _state(value)) for name, value in values.items() if isinstance(value, nn.Module)}
    try:
        with _time_limit():
            use(call.function(**values))
    except Exception as error:
        understood = isinstance(error, _type_errors(call, values))
        problem = None if understood else _problem(error, call.parameters, package, errors)
        changed = [name for name, (model, before) in models.items() if _state(model) != before]
        if problem is None and changed:
            problem = f"{changed[0]} is changed after {type(error).__name__}: {error}"
        return problem
    return None


def try_wrong_arguments(call: Call, package: ModuleType, *errors: type[Exception], examples: int) -> None:
    """Call with generated wrong arguments, the same ones in every run, and fail at the first :func:`complaint`."""

    @settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(changes=wrong_arguments(call))
    def returns_or_refuses(changes: tuple[Change, ...]) -> None:
        assert complaint(call, changes, package, *errors) is None

    returns_or_refuses()


def use(result: Any) -> None:
    """Use a result as a caller would: read generators, enter and leave contexts."""
    if isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, Path):
        with result:
            pass
    elif inspect.isgenerator(result):
        for _ in result:
            pass


def _problem(
    error: Exception, names: list[str], package: ModuleType, errors: tuple[type[Exception], ...]
) -> str | None:
    if isinstance(error, errors):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    folder = str(Path(str(package.__file__)).parent)
    ours = frames[-1].filename.startswith(folder)
    named = any(re.search(rf"\b{re.escape(name)}\b", str(error)) for name in names)
    if isinstance(error, (TypeError, ValueError)) and ours and named:
        return None
    last = next((frame for frame in reversed(frames) if frame.filename.startswith(folder)), frames[-1])
    where = f"{Path(last.filename).name}:{last.lineno}"
    return f"{type(error).__name__}: {str(error)[:300]} ({where}: {last.line})"


def _type_errors(call: Call, values: dict[str, Any]) -> tuple[type[Exception], ...]:
    """The errors that Python and torch may raise for arguments of other types than the right ones.

    The entries of a container may have other types too, so that every container counts.
    """
    right = {name: each.default for name, each in inspect.signature(call.function).parameters.items()} | call.valid()
    scalars = (Tensor, int, float, str, Path)
    wrong = [
        name for name, value in values.items() if type(value) is not type(right[name]) or not isinstance(value, scalars)
    ]
    tensors = any(_has_tensors(values[name]) for name in wrong)
    return (
        *((TypeError, AttributeError, KeyError, ValueError) if wrong else ()),
        *((RuntimeError,) if tensors else ()),
    )


def _has_tensors(value: Any) -> bool:
    """Whether it is a tensor, a container of some, or a generator, whose entries the call has read."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(each, Tensor) for each in value)
    return isinstance(value, Tensor) or inspect.isgenerator(value)


def _state(model: nn.Module) -> list[tuple[Any, ...]]:
    parameters = model.named_parameters(remove_duplicate=False)
    return [(name, type(each), each.dtype, each.device, tuple(each.shape)) for name, each in parameters]


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def expire(*_: Any) -> None:
        raise AssertionError(f"the call took longer than {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
