"""Styles for the inputs and outputs of a sub-layer, on torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_plans import layouts
from tp_plans.styles import GatherSequence, ParallelAttention, ParameterStyle, PrepareModuleInput
from tp_plans.torch_styles.base import Args, ForwardContext, Kwargs, LocalTensorStyle, replaced
from tp_plans.torch_styles.placement import as_dtensor, plain_full_tensor, redistribute


class PrepareModuleInputImpl(LocalTensorStyle):
    """``PrepareModuleInput``: redistributes one argument; a plain tensor is read as replicated."""

    style: PrepareModuleInput | ParallelAttention

    def pre_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs, context: ForwardContext
    ) -> tuple[Args, Kwargs]:
        style = self.style
        if (layout := style.layout) is None:
            return args, kwargs

        def prepared(tensor: Tensor) -> Tensor:
            return redistribute(as_dtensor(tensor, context.mesh, layouts.Replicate()), layout)

        if isinstance(value := kwargs.get(style.argument), Tensor):
            return args, replaced(kwargs, style.argument, prepared(value))
        position = style.position
        if position is not None and position < len(args) and isinstance(args[position], Tensor):
            return (*args[:position], prepared(args[position]), *args[position + 1 :]), kwargs
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any, context: ForwardContext) -> Any:
        if not getattr(self.style, "full_output", False):
            return output
        return _with_first(output, lambda tensor: plain_full_tensor(tensor, context.mesh))


class GatherSequenceImpl(LocalTensorStyle):
    """``GatherSequence``: full plain tensors inside, activations sharded on the sequence outside.

    Args:
        style: the rule.
        parameter_rules: as of every style.
        inner: the style of the module's own rule, which works inside.
    """

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

    def pre_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs, context: ForwardContext
    ) -> tuple[Args, Kwargs]:
        args = tuple(plain_full_tensor(value, context.mesh) for value in args)
        kwargs = {name: plain_full_tensor(value, context.mesh) for name, value in kwargs.items()}
        return self.inner.pre_forward(module, args, kwargs, context)

    def post_forward(self, module: nn.Module, output: Any, context: ForwardContext) -> Any:
        def cut(tensor: Tensor) -> Tensor:
            stream = as_dtensor(tensor, context.mesh, layouts.Replicate())
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
