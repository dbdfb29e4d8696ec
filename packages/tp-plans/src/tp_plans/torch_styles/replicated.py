"""Modules whose parameters every rank holds whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from tp_plans import layouts
from tp_plans.errors import LayoutError
from tp_plans.styles import Replicated, SequenceParallel
from tp_plans.torch_styles.local import Args, Call, Kwargs, LocalStyle, first_argument, summed_gradient
from tp_plans.torch_styles.placement import as_dtensor, redistribute, wrap


class LocalReplicated(LocalStyle):
    """``Replicated``: computes on the activation as it comes; the output of a DTensor has the input's shape."""

    style: Replicated

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        return summed_gradient(parameter) if self.style.gradient == "partial" else parameter.to_local()

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, call: Call) -> tuple[Args, Kwargs]:
        def local(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            self._require_matching(module, tensor)
            call.memory["input"] = tensor
            return tensor.to_local()

        return first_argument(args, kwargs, local)

    def leave(self, module: nn.Module, output: Any, call: Call) -> Any:
        arrived: DTensor | None = call.memory.get("input")
        if arrived is None or not isinstance(output, Tensor):
            return output
        return DTensor.from_local(
            output,
            call.mesh,
            arrived.placements,
            run_check=False,
            shape=arrived.shape,
            stride=arrived.stride(),
        )

    def _require_matching(self, module: nn.Module, tensor: DTensor) -> None:
        """A whole activation gives a full gradient, and nothing else does."""
        whole = tensor.placements == (Replicate(),)
        if whole != (self.style.gradient == "full") or any(p.is_partial() for p in tensor.placements):
            raise LayoutError(
                f"{type(module).__name__} is Replicated(gradient={self.style.gradient!r}) but its input is a DTensor "
                f"with placements {tensor.placements}, so its gradient would be wrong: use "
                f"Replicated(gradient={'full' if whole else 'partial'!r}), or SequenceParallel() for a norm on the "
                "sequence-parallel stream"
            )


class LocalSequenceParallel(LocalStyle):
    """``SequenceParallel``: computes on this rank's part of the sequence."""

    style: SequenceParallel

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        return summed_gradient(parameter)

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, call: Call) -> tuple[Args, Kwargs]:
        sequence = layouts.Shard(self.style.sequence_dim)

        def own_tokens(tensor: Tensor) -> Tensor:
            stream = redistribute(as_dtensor(tensor, call.mesh, layouts.Replicate()), sequence)
            call.memory["length"] = stream.shape[sequence.dim]
            return stream.to_local()

        return first_argument(args, kwargs, own_tokens)

    def leave(self, module: nn.Module, output: Tensor, call: Call) -> Tensor:
        return wrap(output, call.mesh, layouts.Shard(self.style.sequence_dim), size=call.memory["length"])
