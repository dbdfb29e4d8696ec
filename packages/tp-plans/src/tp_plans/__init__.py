"""Tensor-parallel plans as pure data: which layer of which architecture is split how.

Importing this package costs next to nothing: ``tp_plans._api`` lists what is public, and is imported at the first
use of a name.  Neither torch nor transformers is needed for that; ``Plan.to_torch`` imports torch when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tp_plans._api import *  # noqa: F403
    from tp_plans._api import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        import tp_plans._api as names

        if name == "__all__" or name in names.__all__:
            value = globals()[name] = getattr(names, name)
            return value
        raise AttributeError(f"module 'tp_plans' has no attribute {name!r}")

    def __dir__() -> list[str]:
        import tp_plans._api as names

        return sorted({*globals(), *names.__all__})
