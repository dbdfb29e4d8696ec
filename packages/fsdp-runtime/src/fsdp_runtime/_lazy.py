"""Public names that are imported at their first use, for packages that must open without torch or without an extra."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from fsdp_runtime.errors import BackendError


def lazy_names(
    package: str,
    homes: Mapping[str, str] | str,
    *,
    extras: Mapping[str, str] | None = None,
    moved: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562)."""
    # ``homes`` has the module of each public name, or is a module with the names in its ``__all__``. ``extras`` has the
    # extra of fsdp-runtime that installs a module's imports, and ``moved`` the successor of an earlier name.

    def names() -> Mapping[str, str]:
        return homes if not isinstance(homes, str) else dict.fromkeys(("__all__", *import_module(homes).__all__), homes)

    def find(name: str) -> Any:
        # Other private names are submodules, which the import system finds.
        home = None if name.startswith("_") and name != "__all__" else names().get(name)
        if home is None:
            new = (moved or {}).get(name)
            told = "" if new is None else f": use {new}"
            raise AttributeError(f"module {package!r} has no attribute {name!r}{told}")
        try:
            value = getattr(import_module(home), name)
        except ModuleNotFoundError as error:
            extra = (extras or {}).get(home)
            if extra is None or (error.name or "").startswith("fsdp_runtime"):
                raise
            raise BackendError(f"{name} needs the package {error.name}: pip install 'fsdp-runtime[{extra}]'") from error
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *names()})
