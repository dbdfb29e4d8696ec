"""Holding gathered parameters over several forward calls, as log-prob inference wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime.sharding import reshards_after_forward

_HELD = "_fsdp_runtime_held"


@contextmanager
def unsharded(model: nn.Module) -> Iterator[nn.Module]:
    """Keep the FSDP2 parameters of ``model`` gathered inside the ``with``: no gather per call.

    Parameters split over ``tp`` stay split.  On exit, after an error too, parameters are sharded again and each
    unit reshards after forward as before.  Nested use inside the same model leaves the outer one in force.  Does
    nothing for a model that FSDP2 does not wrap.

    Args:
        model: a model, or some blocks of one.
    """
    units = [
        (module, reshards_after_forward(module, is_root=module is model))
        for module in model.modules()
        if isinstance(module, FSDPModule) and not module.__dict__.get(_HELD)
    ]
    try:
        for unit, _ in units:
            unit.__dict__[_HELD] = True
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield model
    finally:
        for unit, reshards in units:
            unit.set_reshard_after_forward(reshards, recurse=False)
            unit.reshard()
            unit.__dict__.pop(_HELD, None)
