"""Mixtures of experts whose experts are dealt over the axis, and modules whose outputs are addends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tp_plans import layouts
from tp_plans._torch_compat import own_parameters
from tp_plans.errors import LayoutError, PlanError
from tp_plans.layouts import Layout
from tp_plans.row_ranges import shard_ranges
from tp_plans.styles import AllReduceOutput, ExpertsParallel, ScaleInput
from tp_plans.torch_styles.base import Args, Call, Kwargs, LocalStyle, first_argument
from tp_plans.torch_styles.gradients import depending, with_summed_gradient
from tp_plans.torch_styles.placement import plain_whole, redistribute, wrap
from tp_plans.torch_styles.reduce import handed_on, reduced

#: What transformers' expert modules call the number of experts that they hold.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

#: What tells transformers' batched and grouped experts (5.23) to look for the index that stands for no expert: without
#: it their kernels leave such rows as memory had them.
_SKIPS = "_is_expert_parallel"


class LocalExperts(LocalStyle):
    """``ExpertsParallel``: runs this rank's experts on all tokens, sums over the ranks.

    Routes to other ranks' experts get the index that stands for no expert, and the weight zero.
    """

    style: ExpertsParallel

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if not any(parameter is not None for parameter in own_parameters(module).values()):
            raise PlanError(
                f"{type(module).__name__} has no parameters of its own, so there are no stacked experts to deal: "
                "ExpertsParallel is for modules that hold them as [experts, ...]"
            )
        if hasattr(module, _SKIPS):
            setattr(module, _SKIPS, True)

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, call: Call) -> tuple[Args, Kwargs]:
        experts = next(iter(call.parameters.values())).shape[0]
        own = shard_ranges(experts, call.mesh.size())[call.mesh.get_local_rank()]
        for name in _COUNTS:
            if getattr(module, name, None) == experts:
                call.attributes[name] = experts
                setattr(module, name, len(own))
        args, kwargs = _changed(args, kwargs, lambda tensor: _whole(tensor, call))
        index = next((value for value in (*args, *kwargs.values()) if _is_index(value)), None)
        if index is None:
            return first_argument(args, kwargs, lambda tokens: _own_tokens(tokens, own, experts, module, call))
        if not self.style.skips_sentinel_index and not len(shard_ranges(experts, call.mesh.size())[-1]):
            raise LayoutError(
                f"{type(module).__name__} runs every route, and {experts} experts over tp={call.mesh.size()} leave a "
                "rank without any to run: use a smaller tp"
            )
        foreign = (index < own.start) | (index >= own.stop)

        # Where no token comes to a rank, its output depends on nothing, and backward would leave the others waiting.
        call.memory["read"] = [*own_parameters(module).values(), *args, *kwargs.values()]

        tokens = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

        def routed(value: Tensor) -> Tensor:
            if value is index:
                return (index - own.start).masked_fill(foreign, len(own) if self.style.skips_sentinel_index else 0)
            return value.masked_fill(foreign, 0) if value is not tokens and value.shape == index.shape else value

        return _changed(args, kwargs, routed)

    def leave(self, module: nn.Module, output: Tensor, call: Call) -> Tensor:
        if not output.requires_grad:
            output = depending(output, call.memory.get("read", ()))
        if (tokens := call.memory.get("tokens")) is None:
            return _in_layout(output, call, self.style.output_layouts)
        gathered = wrap(output, call.mesh, layouts.Shard(0), size=tokens)
        lying = redistribute(gathered, self.style.output_layouts)
        return handed_on(lying, use_local_output=_is_whole(self.style.output_layouts))


class LocalSum(LocalStyle):
    """``AllReduceOutput``: sums the ranks' outputs, and the gradients of the inputs."""

    style: AllReduceOutput

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, call: Call) -> tuple[Args, Kwargs]:
        args, kwargs = _changed(args, kwargs, lambda tensor: _whole(tensor, call))
        call.memory["read"] = [*own_parameters(module).values(), *args, *kwargs.values()]
        return args, kwargs

    def leave(self, module: nn.Module, output: Tensor, call: Call) -> Tensor:
        if not output.requires_grad:
            output = depending(output, call.memory["read"])
        return _in_layout(output, call, self.style.output_layouts)


class LocalDivided(LocalStyle):
    """``ScaleInput``: a rank's share of what every rank computes alike."""

    style: ScaleInput

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, call: Call) -> tuple[Args, Kwargs]:
        return first_argument(args, kwargs, lambda tensor: tensor / call.mesh.size())


def _changed(args: Args, kwargs: Kwargs, change: Callable[[Tensor], Tensor]) -> tuple[Args, Kwargs]:
    """The arguments with every tensor changed."""

    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else value

    return tuple(changed(value) for value in args), {name: changed(value) for name, value in kwargs.items()}


def _is_index(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


def _whole(tensor: Tensor, call: Call) -> Tensor:
    """A plain tensor, whole on every rank, each of which computes an addend of its gradient."""
    whole: Tensor = plain_whole(tensor, call.mesh)
    return with_summed_gradient(whole, call.mesh) if whole.requires_grad else whole


def _own_tokens(tokens: Tensor, own: range, experts: int, module: nn.Module, call: Call) -> Tensor:
    """This rank's part of ``[experts * tokens, hidden]``."""
    if tokens.shape[0] % experts or experts % call.mesh.size():
        raise LayoutError(
            f"{type(module).__name__} takes every expert's tokens in turn, [experts * tokens, hidden], but got "
            f"{list(tokens.shape)} for {experts} experts over tp={call.mesh.size()}: the first dim must be a multiple "
            "of the experts, and the experts of tp"
        )
    call.memory["tokens"] = tokens.shape[0]
    each = tokens.shape[0] // experts
    return tokens[own.start * each : own.stop * each]


def _in_layout(output: Tensor, call: Call, layout: Layout) -> Tensor:
    return reduced(output, call.mesh, layout, use_local_output=_is_whole(layout))


def _is_whole(layout: Layout) -> bool:
    return isinstance(layout, layouts.Replicate)
