"""Column-wise and row-wise linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_plans import layouts
from tp_plans.layouts import compute_ranges
from tp_plans.module_attrs import resolve_int
from tp_plans.styles import ColwiseParallel, MLAKVProjection, ParameterStyle, RowwiseParallel, Style
from tp_plans.torch_styles.base import FirstTensorStyle, ForwardContext
from tp_plans.torch_styles.boundaries import entered, known_part, local_part, summed_gradient, with_summed_gradient
from tp_plans.torch_styles.gradients import local_view, to_local_writable
from tp_plans.torch_styles.placement import as_dtensor, prepared, redistribute, reduce_output, to_output, wrap
from tp_plans.torch_styles.row_all_to_all import RowExchange


class _LinearImpl(FirstTensorStyle):
    """Fetches the rows (``dim`` 0) or columns of a weight that a rank computes with, where others store them."""

    style: ColwiseParallel | RowwiseParallel
    dim: ClassVar[int]

    @property
    def reads_parts(self) -> bool:
        """The weight, and the bias."""
        return True

    def __init__(self, style: Style, parameter_rules: Mapping[str, ParameterStyle] | None = None) -> None:
        super().__init__(style, parameter_rules)
        self._exchanges: dict[int, RowExchange] = {}  # by size of the weight

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        style = self.style
        shared = isinstance(style, ColwiseParallel) and style.replicate_kv_heads
        if not (style.fused_sizes or shared):
            return
        size = cast(Tensor, module.weight).shape[self.dim]
        pieces, unit = cast("tuple[int, ...]", style.fused_sizes), cast(int, style.multiple_of)
        used = compute_ranges(size, mesh.size(), unit=unit, pieces=pieces, shared=shared)
        exchange = RowExchange(size, used, mesh.get_local_rank())
        if exchange.needed:
            self._exchanges[size] = exchange

    def gradient_of_part(self, name: str, parameter: DTensor) -> Literal["full", "first"] | None:
        """Return ``None`` for a weight with fetched rows or columns."""
        return None if self._exchanges and parameter.shape[self.dim] in self._exchanges else "full"


class ColwiseParallelImpl(_LinearImpl):
    """``ColwiseParallel``: gathers the input, computes this rank's features."""

    style: ColwiseParallel
    dim = 0

    def __init__(self, style: Style, parameter_rules: Mapping[str, ParameterStyle] | None = None) -> None:
        super().__init__(style, parameter_rules)
        #: A plain input is replicated; the module's result is its output.
        self._is_replicated = getattr(style, "input_layouts", layouts.Replicate()) == layouts.Replicate()
        self._is_output = getattr(style, "use_local_output", False) and self.style.output_layouts == layouts.Shard(-1)

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        own = local_view(parameter)
        exchange = self._exchanges.get(parameter.shape[0]) if self._exchanges else None
        return own if exchange is None else exchange(own, parameter.device_mesh)

    def enter(self, module: nn.Module, tensor: Tensor, context: ForwardContext) -> Tensor:
        if not torch.compiler.is_compiling():
            if isinstance(tensor, DTensor):
                if (part := known_part(tensor, context.mesh)) is not None:
                    return part
            elif self._is_replicated:
                return with_summed_gradient(tensor, context.mesh) if tensor.requires_grad else tensor
        arrived = self._read(tensor, context)
        # Each rank's features give a part of the input's gradient.  It is summed where the input came from, and here
        # for partial sums.
        if arrived.placements[0].is_partial():
            return summed_gradient(redistribute(arrived, layouts.Replicate()))
        return entered(prepared(arrived, context.mesh, layouts.Replicate()))

    def _read(self, tensor: Tensor, context: ForwardContext) -> DTensor:
        if isinstance(tensor, DTensor) or self._is_replicated:
            return as_dtensor(tensor, context.mesh, layouts.Replicate())
        features = context.shape("weight")[1]
        return wrap(tensor, context.mesh, tensor.ndim - 1, size=features)

    def post_forward(self, module: nn.Module, output: Tensor, context: ForwardContext) -> Tensor:
        style = self.style
        if self._is_output:
            return output
        features = context.shape("weight")[0]
        sharded = wrap(output, context.mesh, output.ndim - 1, size=features)
        return to_output(redistribute(sharded, style.output_layouts), use_local_output=style.use_local_output)


class RowwiseParallelImpl(_LinearImpl):
    """``RowwiseParallel``: computes a partial sum of the output and sums over the ranks."""

    style: RowwiseParallel
    dim = 1

    def gradient_of_part(self, name: str, parameter: DTensor) -> Literal["full", "first"] | None:
        """Let the first rank add the bias."""
        return "first" if name == "bias" else super().gradient_of_part(name, parameter)

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        if name != "bias":
            own = local_view(parameter)
            exchange = self._exchanges.get(parameter.shape[1]) if self._exchanges else None
            return own if exchange is None else exchange(own.mT, parameter.device_mesh).mT
        return on_first_rank(local_view(parameter), parameter.device_mesh)

    def enter(self, module: nn.Module, tensor: Tensor, context: ForwardContext) -> Tensor:
        if not isinstance(tensor, DTensor) and isinstance(self.style.input_layouts, layouts.Shard):
            return tensor
        features = layouts.Shard(tensor.ndim - 1)
        return local_part(redistribute(as_dtensor(tensor, context.mesh, self.style.input_layouts), features))

    def post_forward(self, module: nn.Module, output: Tensor, context: ForwardContext) -> Tensor:
        return reduce_output(
            output, context.mesh, self.style.output_layouts, use_local_output=self.style.use_local_output
        )


class MLAKVProjectionImpl(ColwiseParallelImpl):
    """``MLAKVProjection``: gathers the features; sums the gradients of the rotary key that all heads share."""

    style: MLAKVProjection  # type: ignore[assignment]

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Its rows are used where they are stored."""

    def post_forward(self, module: nn.Module, output: Tensor, context: ForwardContext) -> Tensor:
        rotary = resolve_int(module, self.style.rope_dim, least=0)
        own = wrap(output, context.mesh, output.ndim - 1, size=context.shape("weight")[0])
        full = to_local_writable(redistribute(own, layouts.Replicate()))
        if not rotary:
            return full
        compressed, shared_key = full[..., :-rotary], full[..., -rotary:]
        return torch.cat([compressed, with_summed_gradient(shared_key, context.mesh)], dim=-1)


def on_first_rank(bias: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a replicated bias on the first rank and zeros on the others; the sum over ranks adds it once."""
    return cast(Tensor, _OnFirstRank.apply(bias, mesh.get_local_rank() == 0))  # type: ignore[no-untyped-call]


class _OnFirstRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, is_first: bool) -> Tensor:
        return bias.view_as(bias) if is_first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None  # replicated, and so is the bias's
