"""Every look into what ``nn.Module`` keeps private, with its reason; seen to work on torch 2.10 to 2.15.

By attribute alone: torch is not imported, and a stand-in with the same attributes will do.
"""

from __future__ import annotations

from typing import Any


def own_parameters(module: Any) -> dict[str, Any]:
    """A module's dict of its own parameters, absent ones (``None``) and views in their place included.

    ``named_parameters`` hides both, and assigning an attribute refuses a plain tensor where a parameter was; torch's
    own parametrisation and FSDP2 work on the same dict.
    """
    found: dict[str, Any] = getattr(module, "_parameters", {})
    return found


def own_buffers(module: Any) -> dict[str, Any]:
    """A module's dict of its own buffers, for modules that are no ``nn.Module`` too."""
    found: dict[str, Any] = getattr(module, "_buffers", {})
    return found
