"""Everything between a model and a running mesh: plans applied, FSDP2, weights in and out.

``fsdp_runtime._api`` lists what is public, and is imported at the first use of a name: the command line refuses wrong
arguments, and prints its help and version, before torch is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fsdp_runtime._api import *  # noqa: F403
    from fsdp_runtime._api import __all__ as __all__
else:
    import sys
    from types import ModuleType

    class _Package(ModuleType):
        """The import system binds a submodule to its package; ``estimate`` and ``parallelize`` are functions here."""

        def __setattr__(self, name: str, value: Any) -> None:
            if not (name in ("estimate", "parallelize") and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package

    def __getattr__(name: str) -> Any:
        if name.startswith("_") and name != "__all__":  # private names are submodules, which the import system finds
            raise AttributeError(f"module 'fsdp_runtime' has no attribute {name!r}")
        import fsdp_runtime._api as names

        if name == "__all__" or name in names.__all__:
            value = globals()[name] = getattr(names, name)
            return value
        raise AttributeError(f"module 'fsdp_runtime' has no attribute {name!r}")

    def __dir__() -> list[str]:
        import fsdp_runtime._api as names

        return sorted({*globals(), *names.__all__})
