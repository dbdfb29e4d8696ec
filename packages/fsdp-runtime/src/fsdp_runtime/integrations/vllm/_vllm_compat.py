"""What vLLM 0.32 and 0.33 keep private and the gloo backend needs; imported with vLLM alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, layerwise


def is_registered(factory: Any, backend: str) -> bool:
    """Whether a factory knows a backend; it has no public question for that, and refuses a second registration."""
    return backend in factory._registry


@contextmanager
def processing_replaced(process: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """Call ``process`` in the place of what allocates, packs and copies a layer once all of its weights came.

    That is ``_layerwise_process`` of the layerwise reload, which offers no way to run the weight loaders alone.
    """
    original = layerwise._layerwise_process
    layerwise._layerwise_process = process
    try:
        yield
    finally:
        layerwise._layerwise_process = original


def drop_pending(model: nn.Module, model_config: Any) -> None:
    """Forget the tensors that a reload holds back, and give every incomplete layer its own tensors again.

    After an error the reload keeps them, and the next one would count them twice.
    """
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)
