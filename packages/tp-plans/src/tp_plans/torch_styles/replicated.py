"""Styles for modules that compute with full parameters, on torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tp_plans import layouts
from tp_plans._torch_compat import own_parameters
from tp_plans.errors import LayoutError, PlanError
from tp_plans.styles import GatheredParameters, NoParallel, SequenceParallel
from tp_plans.torch_styles.base import (
    Args,
    Arguments,
    FirstTensorStyle,
    ForwardContext,
    Kwargs,
    LocalTensorStyle,
    distribute_tied,
)
from tp_plans.torch_styles.boundaries import local_parts, shared_part, summed_gradient
from tp_plans.torch_styles.gradients import full_view, local_view
from tp_plans.torch_styles.placement import as_dtensor, existing_dim, plain_full_tensor, prepared, redistribute, wrap


class NoParallelImpl(FirstTensorStyle):
    """``NoParallel``: computes on the local activation, and outputs a DTensor if the input was one."""

    style: NoParallel

    @property
    def reads_parts(self) -> bool:
        """Whether all ranks compute the parameters' full gradients."""
        return self.style.gradient == "full"

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        return summed_gradient(parameter) if self.style.gradient == "partial" else local_view(parameter)

    def gradient_of_part(self, name: str, parameter: DTensor) -> Literal["full", "partial"]:
        return self.style.gradient

    def enter(self, module: nn.Module, tensor: Tensor, context: ForwardContext) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        self._require_matching(module, as_dtensor(tensor, context.mesh, layouts.Replicate()))
        part = shared_part(tensor)
        context.saved.update(arrived=tensor, part=part)
        return part

    def post_forward(self, module: nn.Module, output: Any, context: ForwardContext) -> Any:
        arrived: DTensor | None = context.saved.get("arrived")
        if arrived is None or not isinstance(output, Tensor):
            return output
        (cut,) = arrived.placements
        if not isinstance(cut, Shard):
            return prepared(output, context.mesh, layouts.Replicate())
        own = context.saved["part"].shape[cut.dim]
        if cut.dim >= output.ndim or output.shape[cut.dim] != own:
            raise LayoutError(
                f"{type(module).__name__} got a DTensor sharded on dim {cut.dim} (local size {own}) and returned "
                f"{list(output.shape)}, which has lost that dim: NoParallel is for modules that keep "
                "it; give it a plain tensor"
            )
        return wrap(output, context.mesh, cut.dim, size=arrived.shape[cut.dim])

    def _require_matching(self, module: nn.Module, tensor: DTensor) -> None:
        """Raise unless the input's layout fits the gradient: replicated for "full", sharded for "partial"."""
        (arrived,) = tensor.placements
        expected = {"full": Replicate, "partial": Shard}[self.style.gradient]
        if isinstance(arrived, expected):
            return
        if arrived.is_partial():
            fix = "give it the summed activation"
        else:
            fix = f"use NoParallel(gradient={'partial' if arrived.is_shard() else 'full'!r})"
            fix += ", or SequenceParallel() for a norm on the sequence-parallel stream" * arrived.is_shard()
        raise LayoutError(
            f"{type(module).__name__} is NoParallel(gradient={self.style.gradient!r}) but its input is a DTensor "
            f"with placement {arrived}, so its gradient would be wrong: {fix}"
        )


class SequenceParallelImpl(FirstTensorStyle):
    """``SequenceParallel``: computes on this rank's part of the sequence."""

    style: SequenceParallel

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        return summed_gradient(parameter)

    def gradient_of_part(self, name: str, parameter: DTensor) -> Literal["partial"]:
        return "partial"

    def views(self, module: nn.Module, parameters: Mapping[str, DTensor]) -> Mapping[str, Tensor]:
        # Otherwise together with the stream, in ``enter``.
        return super().views(module, parameters) if self._matched_rules else {}

    def enter(self, module: nn.Module, tensor: Tensor, context: ForwardContext) -> Tensor:
        sequence = layouts.Shard(existing_dim(self.style.sequence_dim, tensor))
        stream = redistribute(as_dtensor(tensor, context.mesh, layouts.Replicate()), sequence)
        context.saved.update(dim=sequence.dim, length=stream.shape[sequence.dim])
        parameters = {} if self._matched_rules else context.parameters
        part, *views = local_parts([stream, *parameters.values()], [False] + [True] * len(parameters))
        if parameters:  # the compiler takes an empty update for a change
            context.views.update(zip(parameters, views, strict=True))
        return part

    def post_forward(self, module: nn.Module, output: Tensor, context: ForwardContext) -> Tensor:
        stream = wrap(output, context.mesh, context.saved["dim"], size=context.saved["length"])
        full: Tensor = plain_full_tensor(stream, context.mesh) if self.style.full_output else stream
        return full


class GatheredParametersImpl(LocalTensorStyle):
    """``GatheredParameters``: the gathered tensors take the parameters' places."""

    style: GatheredParameters

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        for owner, name in self._places(module):
            parameter = own_parameters(owner)[name]
            if parameter is not None and not isinstance(parameter.data, DTensor):
                sharded = distribute_tied(parameter, mesh, layouts.Shard(0), self.src_data_rank)
                owner.register_parameter(name, sharded)

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        return full_view(parameter) if name in self.style.names else super().local_parameter(name, parameter)

    def gradient_of_part(self, name: str, parameter: DTensor) -> Literal["full"] | None:
        return None if name in self.style.names else "full"

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs, context: ForwardContext) -> Arguments:
        for owner, name in self._places(module):
            parameter = own_parameters(owner)[name]
            if isinstance(parameter, DTensor):
                context.swap_in(owner, name, parameter, full_view(parameter))
        return args, kwargs

    def _places(self, module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        for path in self.style.names:
            below, _, name = path.rpartition(".")
            try:
                owner = module.get_submodule(below)
            except AttributeError:
                owner = None
            if owner is None or name not in own_parameters(owner):
                raise PlanError(f"{type(module).__name__} has no parameter {path!r}, which {self.style} is to gather")
            yield owner, name
