"""The buffers and the values of new modules that ``_init_weights`` computes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fsdp_runtime._torch_compat import persistent_buffers
from fsdp_runtime._transformers_compat.conversions import require_known_release
from fsdp_runtime.swaps import swapped

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


def longer_config(config: Any, types: Mapping[str, list[str]], count: int) -> AbstractContextManager[None]:
    """A decoder's config with ``count`` further blocks, of ``types`` by the config's list, inside the ``with``."""
    # ``get_mtp_config`` (since 5.24) restarts the indices at 0 and needs fields that Qwen3-Next's config lacks.
    lists = {name: [*kinds, *types[name]] for name in types if (kinds := getattr(config, name, None)) is not None}
    return swapped(config, num_hidden_layers=config.num_hidden_layers + count, **lists)


def initial_head(owner: Any, block: Any, blocks: nn.ModuleList, index: int) -> Any:
    """Return a block of the decoder's class with the modules of a multi-token head and initial values."""
    # The modules are ``MtpLayer``'s (5.24), under DeepSeek-V3's names.
    weight, config = next(block.parameters()), owner.config
    norm: Any = type(block.input_layernorm)
    with torch.device(weight.device):
        head: Any = type(block)(config, index)
        for name in ("enorm", "hnorm"):
            setattr(head, name, norm(config.hidden_size, eps=config.rms_norm_eps))
        head.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        head.shared_head = nn.Module()
        head.shared_head.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
    for module in head.modules():
        owner._init_weights(module)
    dtypes = {name: parameter.dtype for each in blocks for name, parameter in each.named_parameters()}
    for name, parameter in head.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, weight.dtype))
    return head
