"""``torch.compile`` of each block, in place."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from fsdp_runtime._transformers_compat.models import disable_cache
from fsdp_runtime.argument_types import checked
from fsdp_runtime.errors import OptionError
from fsdp_runtime.parallel.async_tp import enable_async_tp

if TYPE_CHECKING:
    from fsdp_runtime.parallelism import Parallelism

logger = logging.getLogger(__name__)


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


@checked
def apply_compile(model: nn.Module, parallelism: Parallelism) -> None:
    """Compile every block with ``nn.Module.compile``, in place; the sixth of the seven steps.

    Names, classes and the state dict do not change, and blocks of one class share their compiled code.  The hooks of
    tensor parallelism and activation checkpointing are compiled too; FSDP2's hooks, applied later, run outside (the
    order of torchtitan's ``parallelize_llama``).

    ``use_cache`` of the model's configs is set to ``False``: a key/value cache has an entry for each layer, so every
    block would get a graph of its own until the compiler gives up, at ``torch._dynamo.config.recompile_limit``.
    ``model(..., use_cache=True)`` and ``generate`` have a cache nevertheless.

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
    for path in parallelism.structure.blocks:
        model.get_submodule(path).compile(**parallelism.compile_options)
    disable_cache(model)
    logger.info("torch.compile: %d blocks", len(parallelism.structure.blocks))
