"""Loading a checkpoint's tensors into a vLLM model that is running, and trying whether they would load.

Imported by vLLM's workers alone.  vLLM's layerwise reload puts a layer on the meta device, holds back what its weight
loaders are given, and loads, packs and copies once a layer is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.integrations.vllm._vllm_compat import drop_pending, processing_replaced
from fsdp_runtime.integrations.vllm.cpu_repack import repack
from fsdp_runtime.weights.stream import WeightInfo


def load_into(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load full tensors under checkpoint names, and repack what vLLM's CPU backend leaves packed from before.

    After an error the model can be loaded again; layers that were complete before it have new weights.
    """
    initialize_layerwise_reload(model)
    try:
        for pair in weights:
            model.load_weights([pair])
    except BaseException:
        drop_pending(model, model_config)
        raise
    finalize_layerwise_reload(model, model_config)
    repack(model)


def try_on_meta(model: nn.Module, model_config: Any, weights: Sequence[WeightInfo]) -> None:
    """Run the model's weight loaders on meta tensors, and leave the model as it was.

    Raises:
        WeightSyncError: a loader refuses a tensor, or parameters would get nothing; the message names them.
    """
    parameters = {name for name, _ in model.named_parameters()}  # before the reload parts tied ones
    loaded: set[str] = set()
    initialize_layerwise_reload(model)
    try:
        with processing_replaced(lambda layer, info: None):
            for weight in weights:
                tensor = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                try:
                    loaded |= set(model.load_weights([(weight.name, tensor)]) or ())
                except Exception as error:
                    raise WeightSyncError(
                        f"{weight.name} of shape {weight.shape} does not fit the engine's model: "
                        f"{type(error).__name__}: {error}"
                    ) from error
    finally:
        drop_pending(model, model_config)
    missing = sorted(parameters - loaded)
    if missing:
        raise WeightSyncError(f"nothing would be loaded into {len(missing)} parameters, first {missing[0]}")
