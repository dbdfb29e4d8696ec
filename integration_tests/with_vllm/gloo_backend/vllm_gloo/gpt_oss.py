"""Loading gpt-oss into a vLLM that is running (0.32 and 0.33).

vLLM's loader of gpt-oss copies stacked experts and attention sinks into its parameters itself.  During a reload these
are on the meta device, where a copy is lost, and it names them as loaded.  It also takes experts one by one, through
weight loaders that a reload can hold back: here stacks are given to it so.  Sinks are written after the reload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

_STACKED = re.compile(r"(?P<path>.*\.mlp\.experts)\.(?P<part>(gate_up|down)_proj(_bias)?)")
_MODELS = ("GptOssForCausalLM",)


def loadable_parts(model: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint tensor in the form that the model's loader does not lose: stacked experts one by one."""
    stacked = _STACKED.fullmatch(name) if type(model).__name__ in _MODELS else None
    if stacked is None:
        yield name, tensor
        return
    for expert, part in enumerate(tensor):
        yield f"{stacked['path']}.{expert}.{stacked['part']}", part


def sinks_parameter(model: nn.Module, name: str) -> str | None:
    """Return the path of the parameter that a checkpoint's attention sinks belong into; ``None`` for other tensors."""
    if type(model).__name__ not in _MODELS or not name.endswith(".self_attn.sinks"):
        return None
    return name.replace(".self_attn.", ".attn.")
