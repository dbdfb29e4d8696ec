"""Bringing a module's input into a layout before the modules inside use it."""

from __future__ import annotations

from torch import Tensor, nn

from tp_plans import layouts
from tp_plans.styles import PrepareInput
from tp_plans.torch_styles.local import Args, Call, Kwargs, LocalStyle, replaced
from tp_plans.torch_styles.placement import as_dtensor, redistribute


class PreparedInput(LocalStyle):
    """``PrepareInput``: redistributes one argument; a plain tensor is read as replicated."""

    style: PrepareInput

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, call: Call) -> tuple[Args, Kwargs]:
        def prepared(tensor: Tensor) -> Tensor:
            return redistribute(as_dtensor(tensor, call.mesh, layouts.Replicate()), self.style.layout)

        style = self.style
        if isinstance(value := kwargs.get(style.argument), Tensor):
            return args, replaced(kwargs, style.argument, prepared(value))
        position = style.position
        if position is not None and position < len(args) and isinstance(args[position], Tensor):
            return (*args[:position], prepared(args[position]), *args[position + 1 :]), kwargs
        return args, kwargs
