"""Shapes and chunks of tensors that are fused, merged or split between a checkpoint and a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_runtime._transformers_compat.conversions import Conversion
from fsdp_runtime.errors import ConversionError
from fsdp_runtime.sharded.chunks import Chunk
from fsdp_runtime.weights.conversion.trace import NotAChunkError, TracedTensor, traced_input


@dataclass(frozen=True)
class TensorSpec:
    """Full shape and dtype of an input of a conversion."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ConvertedTensor:
    """An output of a conversion."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[Chunk] | None  # of the inputs; ``None`` if the conversion has to run on full ones


def trace_conversion(conversion: Conversion, specs: Mapping[str, TensorSpec]) -> dict[str, ConvertedTensor]:
    """Return the outputs of a conversion by name, without data."""
    inputs = {name: specs[name] for name in conversion.sources}
    try:
        try:
            outputs = conversion.run(
                {name: traced_input(name, spec.shape, spec.dtype) for name, spec in inputs.items()}
            )
        except NotAChunkError:
            outputs = conversion.run({name: _on_meta(spec) for name, spec in inputs.items()})
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        listed = ", ".join(f"{name} {spec.shape}" for name, spec in list(inputs.items())[:8])
        raise ConversionError(
            f"{len(inputs)} tensors cannot be converted between checkpoint and model ({error}): {listed}. Tensors are "
            "missing, or their shapes differ from the config's"
        ) from error
    return {name: _converted(tensor) for name, tensor in outputs.items()}


def _converted(tensor: Tensor) -> ConvertedTensor:
    chunks = tensor.chunks if isinstance(tensor, TracedTensor) else None
    return ConvertedTensor(tuple(tensor.shape), tensor.dtype, chunks)


def _on_meta(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
