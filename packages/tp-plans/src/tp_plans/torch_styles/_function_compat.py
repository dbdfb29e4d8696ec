"""Autograd functions applied without the checks of ``Function.apply``, which take as long on the host as the function.

They are for ``torch.func``, whose transforms still get them.  ``_C._FunctionBase.apply`` and the question whether a
transform is active are private, and the same in all versions from 2.10 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

_transforms_active = torch._C._are_functorch_transforms_active


def direct(function: type[Function]) -> Callable[..., Any]:
    """Return what applies a function in eager code: the compiler traces ``function.apply``."""
    apply = super(Function, function).apply  # type: ignore[misc]

    def applied(*args: Any) -> Any:
        return function.apply(*args) if _transforms_active() else apply(*args)  # type: ignore[no-untyped-call]

    return applied
