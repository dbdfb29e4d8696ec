"""Check that fields of a config have their declared types; Python takes YAML's text ``"False"`` as true."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fsdp_runtime.errors import OptionError

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", dict: "a mapping", tuple: "numbers"}


def require_types(
    where: str, config: Any, *, kind: type | None = None, names: Collection[str] = (), or_none: str = ""
) -> None:
    """Check flags, numbers and mappings of a config; fields of text are checked where they are used."""
    # ``kind`` is the dataclass that declares the fields, by default the config's; ``names``, by default all, are the
    # checked fields; ``or_none`` and fields with the default ``None`` may be ``None``.
    hints = get_type_hints(kind := kind or type(config))
    for each in fields(kind):
        value, hint = getattr(config, each.name, None), hints[each.name]
        unset = value is None and (each.default is None or each.name == or_none)
        if each.name in (names or hints) and not unset and not _fits(value, hint):
            declared = next(get_origin(part) or part for part in (*_parts(hint), hint) if part is not NoneType)
            wanted = _WORDS.get(declared, f"an instance of {getattr(declared, '__name__', declared)}")
            quotes = ", without quotes" if isinstance(value, str) and declared in (bool, int, float) else ""
            raise OptionError(f"{where}{each.name}={value!r}: give {wanted}{quotes}")


def _parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else ()


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in (Any, str):
        return True
    if parts := _parts(hint):
        return any(_fits(value, each) for each in parts)
    if hint is float:
        return isinstance(value, float) or _fits(value, int)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is tuple:
        items = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == len(inner)
        return items and all(map(_fits, value, inner))
    kind = origin or hint
    return isinstance(value, {dict: Mapping, list: Sequence}.get(kind, kind))
