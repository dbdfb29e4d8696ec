"""Parameters below a module that are stored sharded and gathered for its forward."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_plans import layouts
from tp_plans._torch_compat import own_parameters
from tp_plans.errors import PlanError
from tp_plans.styles import GatheredParameters
from tp_plans.torch_styles.base import Args, ForwardContext, Kwargs, LocalTensorStyle, distribute_tied
from tp_plans.torch_styles.gradients import full_view


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

    def pre_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs, context: ForwardContext
    ) -> tuple[Args, Kwargs]:
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
