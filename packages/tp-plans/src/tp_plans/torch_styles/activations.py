"""Styles for the inputs and outputs of a sub-layer, on torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_plans import layouts
from tp_plans._validate import is_integer
from tp_plans.module_attrs import getattr_path, key_value_heads
from tp_plans.styles import GatherSequence, ParallelAttention, ParameterStyle, PrepareModuleInput
from tp_plans.torch_styles.base import Args, Arguments, ForwardContext, Gradient, Kwargs, LocalTensorStyle
from tp_plans.torch_styles.placement import as_dtensor, plain_full_tensor, prepared, redistribute


class PrepareModuleInputImpl(LocalTensorStyle):
    """``PrepareModuleInput``: redistributes one argument; a plain tensor is read as replicated."""

    style: PrepareModuleInput | ParallelAttention

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs, context: ForwardContext) -> Arguments:
        style = self.style
        if (layout := style.layout) is None:
            return args, kwargs

        if isinstance(value := kwargs.get(style.argument), Tensor):
            return args, {**kwargs, style.argument: prepared(value, context.mesh, layout)}
        position = style.position
        if position is not None and position < len(args) and isinstance(args[position], Tensor):
            entered = prepared(args[position], context.mesh, layout)
            return (*args[:position], entered, *args[position + 1 :]), kwargs
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any, context: ForwardContext) -> Any:
        if not getattr(self.style, "full_output", False):
            return output
        return _with_first(output, lambda tensor: plain_full_tensor(tensor, context.mesh))


class ParallelAttentionImpl(PrepareModuleInputImpl):
    """``ParallelAttention``: prepares the input as ``PrepareModuleInput`` does, and gives the layer its own counts."""

    # The counts change once, when the plan is applied. A config that other modules read too stays as it is: the layer
    # gets a view of it.
    style: ParallelAttention

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        counts = self._local_counts(module, mesh.size())
        of_config = {path.partition(".")[2]: count for path, count in counts.items() if "." in path}
        if of_config and not isinstance(module.config, LocalHeadCountConfig):
            module.config = LocalHeadCountConfig(module.config, of_config)  # type: ignore[assignment]
        for name, count in counts.items():
            if "." not in name:
                setattr(module, name, count)

    def _local_counts(self, module: nn.Module, tp: int) -> dict[str, int]:
        style = self.style
        counts = {
            path: value for path in style.head_count_attrs if is_integer(value := getattr_path(module, path), least=1)
        }
        own = {path: max(1, value // tp) for path, value in counts.items()}
        groups, kv_heads = getattr_path(module, style.kv_groups_attr), key_value_heads(module, style)
        if is_integer(groups, least=1) and kv_heads is not None and kv_heads < tp:
            own[style.kv_groups_attr] = groups * kv_heads // tp
        return own


class LocalHeadCountConfig:
    """A config with some replaced numbers; every other attribute comes from the original."""

    def __init__(self, config: Any, counts: Mapping[str, int]) -> None:
        self.__dict__.update(counts, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # so that copy and pickle find nothing of the config's
            raise AttributeError(name)
        return getattr(self._config, name)


class GatherSequenceImpl(LocalTensorStyle):
    """``GatherSequence``: full plain tensors for the style ``inner``, activations sharded on the sequence outside."""

    style: GatherSequence

    def __init__(
        self, style: GatherSequence, parameter_rules: Mapping[str, ParameterStyle] | None, inner: LocalTensorStyle
    ) -> None:
        super().__init__(style, parameter_rules)
        self.inner = inner

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.inner.prepare(module, mesh)

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        return self.inner.local_parameter(name, parameter)

    def gradient_of_part(self, name: str, parameter: DTensor) -> Gradient | None:
        return self.inner.gradient_of_part(name, parameter)

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs, context: ForwardContext) -> Arguments:
        args = tuple(plain_full_tensor(value, context.mesh) for value in args)
        kwargs = {name: plain_full_tensor(value, context.mesh) for name, value in kwargs.items()}
        shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        context.saved["stream"] = shapes[0] if shapes else None
        return self.inner.pre_forward(module, args, kwargs, context)

    def post_forward(self, module: nn.Module, output: Any, context: ForwardContext) -> Any:
        def cut(tensor: Tensor) -> Tensor:
            stream = as_dtensor(_as_stream(tensor, context.saved["stream"]), context.mesh, layouts.Replicate())
            return redistribute(stream, layouts.Shard(self.style.sequence_dim))

        output = self.inner.post_forward(module, output, context)
        if self.style.full_output:
            return output
        return _with_first(output, cut)


def _with_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the hidden states of an output: the output itself, or the first of a tuple or list."""
    if not isinstance(output, (tuple, list)):
        return change(output)
    changed = (change(output[0]), *output[1:])
    return [*changed] if isinstance(output, list) else changed


def _as_stream(tensor: Tensor, shape: torch.Size | None) -> Tensor:
    """Return an output with flattened tokens in the shape of the stream, as its caller will view it."""
    # The flattened dim cannot be sharded on the sequence: torch would deal it out strided, and cannot compile that.
    if shape is None or isinstance(tensor, DTensor) or tensor.ndim != len(shape) - 1 or tensor.shape[-1] != shape[-1]:
        return tensor
    return tensor.reshape(shape) if tensor.shape[:-1].numel() == shape[:-1].numel() else tensor
