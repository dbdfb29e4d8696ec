"""``torch.compile`` of each block, in place."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_runtime._transformers_compat.models import disable_cache
from fsdp_runtime.errors import OptionError
from fsdp_runtime.steps.async_tp import enable_async_tp

if TYPE_CHECKING:
    from fsdp_runtime.parallelism import Parallelism

logger = logging.getLogger(__name__)

#: Graphs that a piece of code can have before torch leaves the rest to Python; torch's own limit is 8.  All decoder
#: layers of transformers share the code that is counted (``GradientCheckpointingLayer``), and one kind of block has a
#: graph for the first length and one for any, each with and without gradients, and again where ``tp`` divides it.
RECOMPILE_LIMIT = 64


def check_compile_options(options: Mapping[str, Any]) -> None:
    """Check that ``torch.compile`` accepts the keywords; nothing is compiled.

    Raises:
        OptionError: it does not, as for a backend that does not exist.
    """
    try:
        nn.Identity().compile(**options)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise OptionError(f"compile={dict(options)!r} is refused by torch.compile: {reason}") from error


def apply_compile(model: nn.Module, parallelism: Parallelism) -> None:
    """Compile every block with ``nn.Module.compile``, in place; the sixth of the seven steps.

    Names, classes and the state dict do not change, and blocks of one class share their compiled code.  The hooks of
    tensor parallelism and activation checkpointing are compiled too; FSDP2's hooks, applied later, run outside (the
    order of torchtitan's ``parallelize_llama``).

    ``use_cache`` of the model's configs is set to ``False``: a key/value cache has an entry for each layer, so every
    block would get a graph of its own until the compiler gives up.  ``model(..., use_cache=True)`` and ``generate``
    have a cache nevertheless.  From torch 2.13 on, ``recompile_limit`` is 64 unless the options have one.

    Args:
        model: the model.
        parallelism: from :func:`fsdp_runtime.resolve_parallelism`; its ``compile_options`` are ``None`` where nothing
            is compiled, and then nothing changes.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import MeshSpec, apply_compile, describe_parallelism, resolve_parallelism
        >>> model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]))
        >>> mesh = MeshSpec().build(device_type="cpu")
        >>> apply_compile(model, resolve_parallelism(model, mesh, compile={"backend": "eager"}))
        >>> describe_parallelism(model).compiled
        ('0.0',)
    """
    if parallelism.compile_options is None:
        return
    if parallelism.async_tensor_parallel and parallelism.tp_mesh is not None:
        enable_async_tp(parallelism.tp_mesh)
    options = _with_limit(parallelism.compile_options)
    for path in parallelism.structure.blocks:
        model.get_submodule(path).compile(**options)
    disable_cache(model)
    logger.info("torch.compile: %d blocks", len(parallelism.structure.blocks))


def _with_limit(options: Mapping[str, Any]) -> Mapping[str, Any]:
    known = "recompile_limit" in inspect.signature(torch.compile).parameters  # not before torch 2.13
    return {"recompile_limit": RECOMPILE_LIMIT, **options} if known else options
