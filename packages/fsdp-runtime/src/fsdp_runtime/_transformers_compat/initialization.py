"""The buffers that ``_init_weights`` computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_runtime._torch_compat import persistent_buffers
from fsdp_runtime._transformers_compat.release import require_known_release

#: The attribute of tensors that transformers' initialisation functions skip.
_INITIALIZED = "_is_hf_initialized"


def initialize_module(owner: Any, module: nn.Module) -> None:
    """Let a ``PreTrainedModel`` compute the buffers of one of its modules, without a change of parameters."""
    # ``from_pretrained`` builds on the meta device itself and relies on ``_init_weights`` for non-persistent buffers,
    # so the method is correct in every architecture of transformers 5.
    require_known_release()
    from transformers.initialization import guard_torch_init_functions

    # Some modules initialise their children's parameters too.
    tensors = [*module.parameters(), *(b for part in module.modules() for b in persistent_buffers(part).values())]
    marked = [tensor for tensor in tensors if not hasattr(tensor, _INITIALIZED)]
    for tensor in marked:
        setattr(tensor, _INITIALIZED, True)
    try:
        with torch.no_grad(), guard_torch_init_functions():
            owner._init_weights(module)
    finally:
        for tensor in marked:
            delattr(tensor, _INITIALIZED)
