"""Holding gathered parameters over several forward calls, as log-prob inference wants."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime._torch_compat import gathered_bytes
from fsdp_runtime.errors import OptionError
from fsdp_runtime.runtime_state import reshards_after_forward, runtime_state

logger = logging.getLogger(__name__)


@contextmanager
def unsharded(model: nn.Module, *, max_bytes: int | None = None) -> Iterator[nn.Module]:
    """Keep the FSDP2 parameters of ``model`` gathered inside the ``with``: no gather per call.

    Parameters come in the dtype that mixed precision computes in; those split over ``tp`` stay split.  On exit, after
    an error too, they are sharded again and each unit reshards after forward as before.  Nested use inside the same
    model leaves the outer one in force.  Does nothing for a model that FSDP2 does not wrap.

    Args:
        model: a model, or some blocks of one.
        max_bytes: hold no more than this at once.  As many units as fit are held, the others gathered by each call as
            ever and freed after it; the largest of those counts, since it comes on top.

    Raises:
        OptionError: ``max_bytes`` is less than what the root and one block take.
    """
    units = [
        _Unit(module, gathered_bytes(module), reshards_after_forward(module, is_root=module is model))
        for module in model.modules()
        if isinstance(module, FSDPModule) and runtime_state(module).unsharded is None
    ]
    held = units if max_bytes is None else _that_fit(units, max_bytes)
    try:
        for unit in units:
            runtime_state(unit.module).unsharded = unit in held
            if unit in held:
                unit.module.set_reshard_after_forward(False, recurse=False)
                unit.module.unshard()
            else:
                unit.module.reshard()  # a forward may have left it gathered
                unit.module.set_reshard_after_forward(True, recurse=False)
        yield model
    finally:
        for unit in units:
            unit.module.set_reshard_after_forward(unit.reshards, recurse=False)
            unit.module.reshard()
            runtime_state(unit.module).unsharded = None


def is_held(module: nn.Module) -> bool:
    """Whether ``unsharded`` keeps a unit gathered at the moment."""
    return runtime_state(module).unsharded is True


@dataclass(frozen=True, eq=False)
class _Unit:
    module: Any
    nbytes: int
    reshards: bool


def _that_fit(units: list[_Unit], max_bytes: int) -> list[_Unit]:
    """The first units that fit beside the largest of the rest."""
    held = list(units)
    while (needed := _needed(held, units)) > max_bytes:
        if len(held) <= 1:  # the root is gathered over every block's forward
            raise OptionError(
                f"max_bytes={max_bytes:,} is too little: the root and the largest block take {needed:,} bytes gathered"
            )
        held.pop()
    if len(held) < len(units):
        logger.info("unsharded: %d of %d units are held within %d bytes", len(held), len(units), max_bytes)
    return held


def _needed(held: list[_Unit], units: list[_Unit]) -> int:
    return sum(unit.nbytes for unit in held) + max((unit.nbytes for unit in units if unit not in held), default=0)
