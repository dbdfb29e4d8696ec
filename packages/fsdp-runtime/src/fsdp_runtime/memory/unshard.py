"""Keep parameters gathered over several forward calls, for log-prob inference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime import _torch_compat as fsdp2
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.runtime_state import reshards_after_forward, runtime_state

logger = logging.getLogger(__name__)


@contextmanager
def unsharded(model: nn.Module, *, max_bytes: int | None = None) -> Iterator[nn.Module]:
    """Keep the FSDP2 parameters of ``model`` gathered inside the ``with``: no all-gather per call.

    Gathered parameters have the compute dtype of mixed precision and stay sharded over ``tp``.  On exit, also after an
    error, parameters are sharded again and FSDP modules get back their ``reshard_after_forward``.  The call changes
    nothing inside an outer ``unsharded`` of the same model, or for a model that FSDP2 does not wrap.

    A forward below the root, such as ``model.model(tokens)``, has complete gradients if its backward runs inside the
    ``with``; use :func:`fsdp_runtime.forward_with_lm_head` for a backward that follows later.

    Args:
        model: a model, or some blocks of one.
        max_bytes: bound on the gathered bytes at any time.  As many FSDP modules as fit stay gathered.  Each call
            gathers and frees the other modules; the largest of these counts towards the bound.

    Yields:
        The same model.

    Raises:
        OptionError: ``max_bytes`` is less than the bytes of the root and one block.
        ModelError: parameters are offloaded, or a backward runs after the ``with`` for a forward that bypassed
            the model's ``forward``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime import unsharded
        >>> model = nn.Linear(2, 2)
        >>> with torch.no_grad(), unsharded(model):  # wrapped by FSDP2: one all-gather for all calls
        ...     outputs = [model(batch) for batch in torch.ones(3, 1, 2)]
        >>> len(outputs)
        3
    """
    state_entries(model)  # raises where parameters are offloaded
    units: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, FSDPModule) and runtime_state(module).unsharded is None
    ]
    reshards = {unit: reshards_after_forward(unit, is_root=unit is model) for unit in units}
    held = units if max_bytes is None else _that_fit(units, max_bytes)
    root = model if isinstance(model, FSDPModule) and runtime_state(model).is_fsdp_root and units else None
    if root is not None:
        fsdp2.initialize_root(root)  # otherwise a forward below the root leaves the root's parameters without gradients
    pending = any(fsdp2.unreduced_gradients(unit) for unit in units)  # after no_sync
    try:
        for unit in units:
            runtime_state(unit).unsharded = unit in held
            unit.reshard()  # an earlier forward may have left the module gathered
            runtime_state(unit).versions = None
            unit.set_reshard_after_forward(unit not in held, recurse=False)
            if unit in held:
                with torch.inference_mode(False):  # FSDP2 keeps the tensors that it allocates
                    unit.unshard()
        with fsdp2.check_saved_tensors(_freed) if units and torch.is_grad_enabled() else nullcontext():
            yield model
        if root is not None and not pending:
            of_root, *of_blocks = (fsdp2.unreduced_gradients(unit) for unit in units)
            if of_root and not any(of_blocks):  # a backward through no FSDP module's output, as from the head
                fsdp2.reduce_gradients(root)
    finally:
        for unit in units:
            unit.set_reshard_after_forward(reshards[unit], recurse=False)
            unit.reshard()
            runtime_state(unit).unsharded = None


def is_held(module: nn.Module) -> bool:
    """Return True while ``unsharded`` keeps a module gathered."""
    return runtime_state(module).unsharded is True


def _freed() -> ModelError:
    return ModelError(
        "backward needs parameters that were freed at the end of 'with unsharded(model):', after a forward that "
        "bypassed the model's own: run backward inside the with, call the model itself, or for a loss on hidden states "
        "call forward_with_lm_head(model, function, ...), which allows a backward at any time"
    )


def _that_fit(units: list[Any], max_bytes: int) -> list[Any]:
    """Return the first modules that fit into ``max_bytes`` beside the largest module of the rest."""
    nbytes = [fsdp2.gathered_bytes(unit) for unit in units]
    held = len(units)
    while (needed := sum(nbytes[:held]) + max(nbytes[held:], default=0)) > max_bytes:
        if held <= 1:  # the root stays gathered during every block's forward
            raise OptionError(
                f"max_bytes={max_bytes:,} is too small: the root and the largest block take {needed:,} bytes gathered"
            )
        held -= 1
    if held < len(units):
        logger.info("unsharded: %d of %d FSDP modules stay gathered within %d bytes", held, len(units), max_bytes)
    return units[:held]
