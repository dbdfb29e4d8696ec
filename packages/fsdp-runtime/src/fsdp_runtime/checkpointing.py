"""Activation checkpointing: what a block computed is freed after forward and recomputed in backward."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_runtime.anatomy import Anatomy
from fsdp_runtime.errors import ModelError, OptionError

logger = logging.getLogger(__name__)

ActivationCheckpointing = Literal["none", "block"]


def require_mode(mode: str) -> None:
    """Raise :class:`OptionError` unless ``mode`` is one that :func:`checkpoint_activations` knows."""
    if mode not in get_args(ActivationCheckpointing):
        allowed = ", ".join(map(repr, get_args(ActivationCheckpointing)))
        raise OptionError(f"activation_checkpointing={mode!r}: write one of {allowed}")


def checkpoint_activations(model: nn.Module, anatomy: Anatomy, mode: ActivationCheckpointing) -> list[str]:
    """Make blocks recompute their activations in backward, in place.

    A key/value cache cannot survive recomputation (each key would be appended twice), so the configs'
    ``use_cache`` is turned off.

    Returns:
        The paths of the blocks that recompute.
    """
    if mode == "none":
        return []
    for block in anatomy.blocks.values():
        _recompute(block)
    _turn_off_cache(model)
    logger.info("activation checkpointing: %d blocks recompute", len(anatomy.blocks))
    return list(anatomy.blocks)


class _Recomputing:
    """Mixed in before a module's class; a subclass rather than a replaced ``forward``, so that deepcopy works."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            raise ModelError(
                f"{type(self).__name__} recomputes its activations but was given a key/value cache, which "
                "recomputation would fill twice: pass use_cache=False"
            )
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _recompute(module: nn.Module) -> None:
    if not isinstance(module, _Recomputing):
        module.__class__ = _recomputing(type(module))  # type: ignore[arg-type]  # mypy: type[Module] is hashable


@cache
def _recomputing(cls: type[nn.Module]) -> type[nn.Module]:
    """One subclass a class: the compiler guards on types and would compile each block anew."""
    return type(f"Recomputing{cls.__name__}", (_Recomputing, cls), {})


def _turn_off_cache(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
