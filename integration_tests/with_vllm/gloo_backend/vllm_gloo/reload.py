"""Loading a checkpoint's tensors into a vLLM model that is running, and trying whether they would load.

Imported by vLLM's workers alone.  vLLM's layerwise reload puts a layer on the meta device, holds back what its weight
loaders are given, and loads, packs and copies once a layer is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from fsdp_runtime._torch_compat import TorchDispatchMode
from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sharded.safetensors_io import WeightInfo
from vllm_gloo._vllm_compat import (
    drop_pending,
    lost_parameters,
    partly_loaded,
    processing_replaced,
    tensor_parallel_rank,
    vocabulary_parameters,
)
from vllm_gloo.cpu_repack import repack
from vllm_gloo.gpt_oss import loadable_parts, sinks_parameter


def load_into(model: Any, model_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load full tensors under checkpoint names, and repack what vLLM's CPU backend leaves packed from before.

    After an error the model can be loaded again; layers that were complete before it have new weights.
    """
    sinks: dict[str, Tensor] = {}
    initialize_layerwise_reload(model)
    try:
        for name, tensor in weights:
            if (path := sinks_parameter(model, name)) is not None:
                sinks[path] = tensor
                continue
            for part in loadable_parts(model, name, tensor):
                model.load_weights([part])
    except BaseException:
        drop_pending(model, model_config)
        raise
    finalize_layerwise_reload(model, model_config)
    for path, tensor in sinks.items():
        parameter = model.get_parameter(path)
        own = tensor.narrow(0, tensor_parallel_rank() * parameter.numel(), parameter.numel())
        parameter.data.copy_(own)
    repack(model)


def try_on_meta(model: Any, model_config: Any, weights: Sequence[WeightInfo], tp: int) -> None:
    """Run the model's weight loaders on meta tensors, and leave the model as it was.

    Loaders of fused and of stacked parameters take their part of a tensor that is too large, and accept one that is too
    small: so the values that they copy are counted.  A worker copies all of a tensor or an equal part of it.

    Args:
        model: vLLM's model.
        model_config: its config.
        weights: what would be loaded, under checkpoint names.
        tp: tensor-parallel workers.

    Raises:
        WeightSyncError: a loader refuses a tensor, or parameters would get nothing or a part; the message names them.
    """
    parameters = {name for name, _ in model.named_parameters()}  # before the reload parts tied ones
    vocabulary, loaded, written = vocabulary_parameters(model), set[str](), set[str]()
    counts = not getattr(model_config, "quantization", None)
    initialize_layerwise_reload(model)
    try:
        with processing_replaced(lambda layer, info: None):
            for weight in weights:
                tensor = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                if (path := sinks_parameter(model, weight.name)) is not None:
                    if path not in parameters or weight.shape != (model.get_parameter(path).numel() * tp,):
                        raise WeightSyncError(f"{_does_not_fit(weight)}: sinks are one number for each head")
                    loaded.add(path)
                    written.add(path)
                    continue
                try:
                    with _Copied() as copied:
                        parts = loadable_parts(model, weight.name, tensor)
                        into = {name for part in parts for name in model.load_weights([part]) or ()}
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    raise WeightSyncError(f"{_does_not_fit(weight)}: {reason}") from error
                lost_all = bool(into) and not copied.numel
                if counts and (lost_all or not (into & vocabulary or _is_part(copied.numel, tensor.numel(), tp))):
                    raise WeightSyncError(
                        f"{_does_not_fit(weight)}: {copied.numel:,} of its {tensor.numel():,} values would be loaded"
                    )
                loaded |= into
        lost = lost_parameters(model, loaded - written)
        partial = partly_loaded(model) if counts else []
    finally:
        drop_pending(model, model_config)
    if missing := sorted(parameters - loaded):
        raise WeightSyncError(f"nothing would be loaded into {len(missing)} parameters, first {missing[0]}")
    if lost:
        raise WeightSyncError(
            f"vLLM's loader names {len(lost)} parameters as loaded and a reload would keep none of their values, first "
            f"{lost[0]}: it copies them past its weight loaders, and this model cannot be updated while it runs"
        )
    if partial:
        raise WeightSyncError(f"weights are missing or too small: {partial[0]} values would be loaded")


def _does_not_fit(weight: WeightInfo) -> str:
    return f"{weight.name} of shape {weight.shape} does not fit the engine's model"


def _is_part(copied: int, numel: int, tp: int) -> bool:
    """Whether so many values are none, all (perhaps several times) or an equal part of a tensor over ``tp`` workers."""
    if copied == 0 or copied % numel == 0:
        return True
    parts, rest = divmod(numel, copied)
    return rest == 0 and tp % parts == 0


class _Copied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the values that ``copy_`` writes, and keeps meta tensors out of biases, which a reload leaves in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            self.numel += target.numel()
            if source.is_meta and not target.is_meta:
                if target.shape != source.shape:
                    raise ValueError(f"shape {tuple(source.shape)} for {tuple(target.shape)}")
                return target
        return func(*args, **(kwargs or {}))
