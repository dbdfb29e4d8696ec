"""What vLLM 0.32 and 0.33 keep private and the gloo backend needs; imported with vLLM alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.distributed import parallel_state
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
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


def vocabulary_parameters(model: nn.Module) -> set[str]:
    """The names of parameters over the vocabulary, whose loaders refuse any other size and copy unequal parts."""
    return {
        f"{path}.{name}"
        for path, layer in model.named_modules()
        if isinstance(layer, VocabParallelEmbedding)
        for name, _ in layer.named_parameters(recurse=False)
    }


def partly_loaded(model: nn.Module) -> list[str]:
    """The layers that a reload gave some of their values, with the numbers; a vocabulary's padding is not loaded.

    Loaders of fused and of stacked parameters accept a part without an error.
    """
    found = []
    for path, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and not isinstance(layer, VocabParallelEmbedding):
            total = info.load_numel_total or 0
            if 0 < info.load_numel < total:
                found.append(f"{info.load_numel:,} of {path}'s {total:,}")
    return found


def lost_parameters(model: nn.Module, loaded: AbstractSet[str]) -> list[str]:
    """The parameters that a loader named as loaded in layers for which the reload counted no value.

    Such a loader copies into the parameter itself, which is on the meta device during a reload.
    """
    found = []
    for path, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and not info.load_numel and info.load_numel_total:
            own = (f"{path}.{name}" for name, _ in layer.named_parameters(recurse=False))
            found += [name for name in own if name in loaded]
    return found


def tensor_parallel_rank() -> int:
    """This worker's rank in its tensor-parallel group."""
    return int(parallel_state.get_tensor_model_parallel_rank())


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
