"""The one mechanism of all styles: a module in a plan keeps DTensor parameters and computes on local tensors.

FSDP, optimizers, checkpoints and norms see the placements of the DTensors.  During its forward the module has this
rank's plain tensors in their place.  These are differentiable views: each parameter gets its full gradient in the
parameter's layout.  Model code, fused kernels and the compiler meet ordinary tensors only, and no operator needs a
sharding strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import Signature, signature
from types import FunctionType
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

import tp_plans.torch_styles._anomaly_compat  # noqa: F401  # registers operators that DTensor lacks
from tp_plans._torch_compat import own_children, own_parameters
from tp_plans.errors import AlreadyParallelizedError, LayoutError
from tp_plans.layouts import Layout, Shard
from tp_plans.naming import EXPERT_COUNTS
from tp_plans.styles import ParameterStyle, Style, parameter_layout
from tp_plans.torch_styles.boundaries import drop_parts, share_parts
from tp_plans.torch_styles.gradients import local_view, parameter_view
from tp_plans.torch_styles.placement import existing_dim, placement

_SHARDED = "_tp_plans_sharded"

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Arguments = tuple[Args, Kwargs]


Gradient = Literal["full", "partial", "first"]


class Part(NamedTuple):
    """A parameter as ``parallelize_module`` left it."""

    shape: torch.Size  # of the full tensor
    #: Of this rank's part: complete or one of the ranks' summands, or complete for a part that the first rank reads
    #: and the others replace by zeros; ``None`` if modules compute with other values.
    gradient: Gradient | None


class ForwardContext:
    """One forward call of a module: its mesh, the state to restore afterwards, the state to remember until then."""

    __slots__ = ("attributes", "mesh", "parameters", "parts", "saved", "swapped", "views")

    def __init__(self, mesh: DeviceMesh, views: dict[str, Any], parts: Mapping[str, Part]) -> None:
        self.mesh = mesh
        self.parts = parts
        #: The module's dict of parameters, filled with plain tensors during the call.
        self.views = views
        self.parameters: dict[str, DTensor] = {}
        self.attributes: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}
        self.swapped: list[tuple[nn.Module, str, DTensor]] = []

    def shape(self, name: str) -> torch.Size:
        """Return the full shape of a parameter; another may have put this rank's part in its place."""
        parameter = self.parameters.get(name)
        return self.parts[name].shape if parameter is None else parameter.shape

    def swap_in(self, owner: nn.Module, name: str, parameter: DTensor, view: Tensor) -> None:
        """Put a plain view in the place of a parameter of another module, below the one that is called."""
        self.swapped.append((owner, name, parameter))
        own_parameters(owner)[name] = view

    def count_own_experts(self, module: nn.Module, names: Sequence[str], own: range) -> None:
        """Let attributes that count all experts (:func:`expert_counts`) count this rank's experts during a forward."""
        for name in names:
            self.attributes[name] = getattr(module, name)
            setattr(module, name, len(own))

    def restore(self, module: nn.Module) -> None:
        """Restore the module's DTensor parameters and attributes, and everything that was swapped elsewhere."""
        if self.parameters:  # the compiler takes an empty update for a change
            self.views.update(self.parameters)
        for name, value in self.attributes.items():
            setattr(module, name, value)
        for owner, name, parameter in self.swapped:
            own_parameters(owner)[name] = parameter


class LocalTensorStyle(ParallelStyle):
    """Base of the styles: distributes a module's parameters and runs its forward on local tensors."""

    # A subclass says how each parameter is viewed locally and how activations enter and leave. ``style`` is ``None``
    # where only parameters of a module have rules: ``parameter_rules``, by name or pattern.

    #: Further attributes of the classes that modules get.
    class_attributes: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, style: Style | None, parameter_rules: Mapping[str, ParameterStyle] | None = None) -> None:
        super().__init__()
        self.style = style
        self.parameter_rules = dict(parameter_rules or {})
        self._matched_rules: dict[str, ParameterStyle] = {}
        self._classes: dict[tuple[type[nn.Module], DeviceMesh], type[nn.Module]] = {}

    @property
    def reads_parts(self) -> bool:
        """Whether this rank's parts of most parameters stand for them."""
        return False

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        """The plain tensor that stands for a parameter during forward."""
        return local_view(parameter)

    def gradient_of_part(self, name: str, parameter: DTensor) -> Gradient | None:
        """Return the gradient of this rank's part (:class:`Part`); ``None`` if forward computes with another tensor."""
        return "full"

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """What else changes, once, when the style is applied."""

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs, context: ForwardContext) -> Arguments:
        """The arguments that the module's forward gets instead."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any, context: ForwardContext) -> Any:
        """The output that the caller gets instead; parameters are DTensors again by now."""
        return output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, _TensorParallelMixin):
            if module.tp_style is self:  # the same rule led here before: the module sits at several places
                return module
            raise AlreadyParallelizedError(
                f"this {type(module).__name__} already carries {module.tp_style.style or 'rules of its parameters'}: "
                "parallelize a model once, and let one rule of the plan match each module"
            )
        if "forward" in module.__dict__:
            raise AlreadyParallelizedError(
                f"this {type(module).__name__} carries another forward in place of its class's, which would "
                "bypass the plan: parallelize the model before whatever patches its modules"
            )
        self.prepare(module, device_mesh)
        self._distribute(module, device_mesh)
        parameters = own_parameters(module).items()
        module.tp_parts = {name: self._part(name, each) for name, each in parameters if isinstance(each, DTensor)}  # type: ignore[assignment]
        module.__class__ = self._class_for(type(module), device_mesh)
        return module

    def _part(self, name: str, parameter: DTensor) -> Part:
        rule = self._matched_rules.get(name)
        if rule is None:
            return Part(parameter.shape, self.gradient_of_part(name, parameter))
        return Part(parameter.shape, None if rule.gathered else rule.gradient)

    def views(self, module: nn.Module, parameters: Mapping[str, DTensor]) -> Mapping[str, Tensor]:
        """The plain tensors that stand for a module's own parameters during forward."""
        tensors = {}
        for name, parameter in parameters.items():
            rule = self._matched_rules.get(name)
            tensors[name] = self.local_parameter(name, parameter) if rule is None else parameter_view(rule, parameter)
        return tensors

    def _distribute(self, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(own_parameters(module).items()):
            # Matched once and here: the compiler traces a call, and cannot trace how patterns are matched.
            rule = next((rule for pattern, rule in self.parameter_rules.items() if fnmatchcase(name, pattern)), None)
            if rule is not None:
                self._matched_rules[name] = rule
            if parameter is None or isinstance(parameter, DTensor):
                continue
            layout = parameter_layout(self._matched_rules.get(name) or self.style, parameter.ndim)
            if layout is not None:
                module.register_parameter(name, distribute_tied(parameter, mesh, layout, self.src_data_rank))

    def _class_for(self, cls: type[nn.Module], mesh: DeviceMesh) -> type[nn.Module]:
        """One class for all modules of a rule, so that equal blocks share one compiled graph."""
        if (cls, mesh) not in self._classes:
            # The names stay, since transformers finds the outputs to record by a class's full name.
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            namespace = {**names, "tp_style": self, "tp_mesh": mesh, **self.class_attributes}
            taken = signature(cls.forward)
            if len(taken.parameters) > 2:  # of a whole model, say: generation and trainers ask for their names
                namespace["forward"] = _forward_with(taken)
            self._classes[cls, mesh] = type(cls.__name__, (_TensorParallelMixin, cls), namespace)
        return self._classes[cls, mesh]


class FirstTensorStyle(LocalTensorStyle):
    """Base of the styles that change the first tensor among the arguments, be it positional or a keyword."""

    def enter(self, module: nn.Module, tensor: Tensor, context: ForwardContext) -> Tensor:
        """The tensor that the module's forward gets instead."""
        raise NotImplementedError

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs, context: ForwardContext) -> Arguments:
        if args and isinstance(args[0], Tensor):
            return (self.enter(module, args[0], context), *args[1:]), kwargs
        name = next((name for name in kwargs if isinstance(kwargs[name], Tensor)), None)
        return args, kwargs if name is None else {**kwargs, name: self.enter(module, kwargs[name], context)}


class _TensorParallelMixin:
    """Mixed in before a module's class: runs its forward between a style's ``pre_forward`` and ``post_forward``."""

    # A class rather than hooks: ``torch.compile`` guards on the ids of hooks that are always called, which differ from
    # block to block, and an interrupt skips hooks. deepcopy keeps a class and copies no state with it.
    tp_style: ClassVar[LocalTensorStyle]
    tp_mesh: ClassVar[DeviceMesh]
    tp_parts: dict[str, Part]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        style, views = self.tp_style, own_parameters(module)
        context = ForwardContext(self.tp_mesh, views, self.tp_parts)
        children = own_children(module)
        shared = share_parts(_parts_read_below(children)) if children and not torch.compiler.is_compiling() else ()
        try:
            for name, parameter in views.items():
                if isinstance(parameter, DTensor):
                    context.parameters[name] = parameter
            if context.parameters:
                views.update(style.views(module, context.parameters))
            args, kwargs = style.pre_forward(module, args, kwargs, context)
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            context.restore(module)
            if shared:
                drop_parts(shared)
        return style.post_forward(module, output, context)


def _forward_with(taken: Signature) -> FunctionType:
    """Return the mixin's forward with another signature; a copy, as one more call would cost host time."""
    mixed = cast(FunctionType, _TensorParallelMixin.forward)
    copied = FunctionType(mixed.__code__, mixed.__globals__, mixed.__name__, closure=mixed.__closure__)
    copied.__signature__ = taken  # type: ignore[attr-defined]
    return copied


def expert_counts(module: nn.Module, experts: int) -> tuple[str, ...]:
    """Return the names of a module's attributes that count all experts."""
    return tuple(name for name in EXPERT_COUNTS if getattr(module, name, None) == experts)


def _parts_read_below(children: Mapping[str, Any]) -> list[DTensor]:
    """Return the parameters below a module that are read as this rank's parts, as projections do."""
    # Of a list, such as one of experts, some may not run. A parameter that FSDP2 has yet to gather has two axes.
    parameters: list[DTensor] = []
    waiting = [*children.values()]
    for module in waiting:
        if isinstance(module, _TensorParallelMixin):
            if module.tp_style.reads_parts:
                own = own_parameters(module).values()
                parameters += [
                    parameter for parameter in own if isinstance(parameter, DTensor) and len(parameter.placements) == 1
                ]
        elif module is not None and not isinstance(module, nn.ModuleList):
            waiting += own_children(module).values()
    return parameters


def distribute_tied(
    parameter: nn.Parameter, mesh: DeviceMesh, layout: Layout, src_data_rank: int | None
) -> nn.Parameter:
    """A parameter distributed; the same new parameter for every place that shares the old one, so ties hold."""
    target = placement(layout)
    if isinstance(layout, Shard):
        existing_dim(layout.dim, parameter)
    known = getattr(parameter, _SHARDED, None)
    if isinstance(known, DTensor) and known.device_mesh == mesh:
        if known.placements != (target,):
            raise LayoutError(
                f"a weight of shape {list(parameter.shape)} is tied: another module has it laid out as "
                f"{known.placements[0]}, this rule wants {target}, which would untie it; give both places one "
                "layout (tp_plans.check names them)"
            )
        return known  # type: ignore[return-value]
    distributed = distribute_tensor(parameter.detach(), mesh, [target], src_data_rank=src_data_rank)
    sharded = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    setattr(parameter, _SHARDED, sharded)
    return sharded
