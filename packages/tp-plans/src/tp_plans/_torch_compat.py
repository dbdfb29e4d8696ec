"""Every use of private attributes of ``nn.Module``, with its reason; seen to work on torch 2.11 to 2.15.

Torch is not imported: an object with the same attributes will do.
"""

from __future__ import annotations

from typing import Any


def own_parameters(module: Any) -> dict[str, Any]:
    """Return a module's dict of direct parameters, with absent ones (``None``) and views that replace parameters."""
    # ``named_parameters`` hides both, and assigning an attribute refuses a plain tensor where a parameter was; torch's
    # own parametrisation and FSDP2 work on the same dict.
    parameters: dict[str, Any] = getattr(module, "_parameters", {})
    return parameters


def own_children(module: Any) -> dict[str, Any]:
    """Return a module's dict of direct children; ``named_children`` takes ten times as long in every call."""
    children: dict[str, Any] = module._modules
    return children


def own_buffers(module: Any) -> dict[str, Any]:
    """Return a module's dict of direct buffers, also for modules that are no ``nn.Module``."""
    buffers: dict[str, Any] = getattr(module, "_buffers", {})
    return buffers


#: The method that runs a module's hooks and forward; the compiler looks it up by this name.
CALL = "_call_impl"


def call_of(module_class: Any) -> Any:
    """Return a module class's call of hooks and forward; the compiler can be told to leave both to Python."""
    # Hooks that are added later, as FSDP2's, then run outside of compiled code, which would skip them.
    return module_class._call_impl
