"""The one mechanism of all styles: a module in a plan keeps DTensor parameters and computes on local tensors.

Parameters are DTensors, so that FSDP, optimizers, checkpoints and norms see how they lie.  For the duration of
its forward the module finds in their place this rank's plain tensors, taken by differentiable views that give
each parameter its whole gradient in the parameter's own layout.  Model code, fused kernels and the compiler
therefore meet ordinary tensors only, and no operator needs a sharding strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from tp_plans.errors import AlreadyParallelizedError, LayoutError
from tp_plans.styles import Style, parameter_layout
from tp_plans.torch_styles.placement import placement

_SHARDED = "_tp_plans_sharded"

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass
class Call:
    """One forward call of a module: its mesh, what to put back afterwards, what to remember until then."""

    mesh: DeviceMesh
    parameters: dict[str, DTensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)

    def put_back(self, module: nn.Module) -> None:
        """Give the module its DTensor parameters and its attributes again."""
        cast("dict[str, Tensor | None]", module._parameters).update(self.parameters)
        for name, value in self.attributes.items():
            setattr(module, name, value)


class LocalStyle(ParallelStyle):
    """Base of the styles: distributes a module's parameters and runs its forward on local tensors.

    A subclass says how each parameter is viewed locally and how activations enter and leave.
    """

    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style = style
        self._classes: dict[tuple[type[nn.Module], DeviceMesh], type[nn.Module]] = {}

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        """The plain tensor that stands for a parameter during forward."""
        return local_view(parameter)

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, call: Call) -> tuple[Args, Kwargs]:
        """The arguments that the module's forward gets instead."""
        return args, kwargs

    def leave(self, module: nn.Module, output: Any, call: Call) -> Any:
        """The output that the caller gets instead; parameters are DTensors again by now."""
        return output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, _Parallel):
            if module.tp_style is self:  # the same rule led here before: the module sits at several places
                return module
            raise AlreadyParallelizedError(
                f"this {type(module).__name__} already carries {module.tp_style.style}: "
                "parallelize a model once, and let one rule of the plan match each module"
            )
        if "forward" in module.__dict__:
            raise AlreadyParallelizedError(
                f"this {type(module).__name__} carries a forward of its own in place of its class's, which would "
                "bypass the plan: parallelize the model before whatever patches its modules"
            )
        self._distribute(module, device_mesh)
        module.__class__ = self._class_for(type(module), device_mesh)
        return module

    def _distribute(self, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module._parameters.items()):
            if parameter is None or isinstance(parameter, DTensor):
                continue
            layout = parameter_layout(self.style, parameter.ndim)
            if layout is not None:
                sharded = _distributed_once(parameter, mesh, layout, self.src_data_rank)
                module.register_parameter(name, sharded)

    def _class_for(self, cls: type[nn.Module], mesh: DeviceMesh) -> type[nn.Module]:
        """One class for all modules of a rule, so that equal blocks share one compiled graph."""
        if (cls, mesh) not in self._classes:
            # The names stay, since transformers looks up what to record by a class's full name.
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            namespace = {**names, "tp_style": self, "tp_mesh": mesh}
            self._classes[cls, mesh] = type(cls.__name__, (_Parallel, cls), namespace)
        return self._classes[cls, mesh]


class _Parallel:
    """Mixed in before a module's class: runs its forward between a style's ``enter`` and ``leave``.

    A class rather than hooks: ``torch.compile`` guards on the ids of hooks that are always called, which differ
    from block to block, and an interrupt skips hooks.  deepcopy keeps a class and copies no state with it.
    """

    tp_style: ClassVar[LocalStyle]
    tp_mesh: ClassVar[DeviceMesh]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module, style = cast(nn.Module, self), self.tp_style
        call = Call(self.tp_mesh)
        parameters = cast("dict[str, Tensor | None]", module._parameters)
        call.parameters = {n: p for n, p in parameters.items() if isinstance(p, DTensor)}
        try:
            parameters.update({n: style.local_parameter(n, p) for n, p in call.parameters.items()})
            args, kwargs = style.enter(module, args, kwargs, call)
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            call.put_back(module)
        return style.leave(module, output, call)


def _distributed_once(
    parameter: nn.Parameter, mesh: DeviceMesh, layout: Any, src_data_rank: int | None
) -> nn.Parameter:
    """A parameter distributed; the same new parameter for every place that shares the old one, so ties hold."""
    wanted = placement(layout)
    known = getattr(parameter, _SHARDED, None)
    if isinstance(known, DTensor) and known.device_mesh == mesh:
        if known.placements != (wanted,):
            raise LayoutError(
                f"a weight of shape {list(parameter.shape)} is tied: another module has it laid out as "
                f"{known.placements[0]}, this rule wants {wanted}, which would untie it; give both places one "
                "layout (tp_plans.check tells their names)"
            )
        return known  # type: ignore[return-value]
    distributed = distribute_tensor(parameter.detach(), mesh, [wanted], src_data_rank=src_data_rank)
    sharded = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    setattr(parameter, _SHARDED, sharded)
    return sharded


def local_view(parameter: DTensor) -> Tensor:
    """This rank's plain part of a parameter, whose gradient lies as the parameter does."""
    (cut,) = parameter.placements
    uneven = isinstance(cut, Shard) and cut.dim > 0 and parameter.shape[cut.dim] % parameter.device_mesh.size()
    if uneven and parameter.requires_grad and torch.is_grad_enabled():
        return cast(Tensor, _UnevenView.apply(parameter))  # type: ignore[no-untyped-call]
    return parameter.to_local()


class _UnevenView(torch.autograd.Function):
    """``to_local`` for parts of different width.

    torch 2.10's own takes the gradient's strides from this rank's width; they are not the parameter's then, and
    gradient accumulation answers with a replicated copy.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        return parameter.to_local()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return DTensor.from_local(
            gradient, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


def summed_gradient(whole: DTensor) -> Tensor:
    """A replicated tensor's local view whose gradient is summed over the axis, so every rank gets the full one."""
    return cast(Tensor, _SumGradient.apply(whole.to_local(), whole.device_mesh))  # type: ignore[no-untyped-call]


class _SumGradient(torch.autograd.Function):
    """Identity forward; the sum over the mesh backward (Megatron-LM's ``f``, arXiv:1909.08053)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        partial = DTensor.from_local(gradient, ctx.mesh, [Partial()], run_check=False)
        return partial.full_tensor(), None


def first_argument(args: Args, kwargs: Kwargs, change: Callable[[Tensor], Tensor]) -> tuple[Args, Kwargs]:
    """The arguments with the first tensor changed, be it positional or one of the keywords."""
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    name = next((name for name in kwargs if isinstance(kwargs[name], Tensor)), None)
    return (args, kwargs) if name is None else (args, replaced(kwargs, name, change(kwargs[name])))


def replaced(kwargs: Mapping[str, Any], name: str, value: Any) -> Kwargs:
    """``kwargs`` with one value replaced."""
    return {**kwargs, name: value}
