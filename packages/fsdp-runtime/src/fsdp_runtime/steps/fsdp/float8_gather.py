"""FSDP2 gathers the weights of float8 layers in float8: half of bfloat16's bytes, and the same products.

A rank casts its shard by the scale of the full weight.  A forward after an update all-reduces the maxima of all weights
once.  The gathered weight has the compute dtype and the values of float8, so that every other reader gets a plain
tensor; the layer casts it by the same scale, without another rounding.  Source of the method: torchao's
``enable_fsdp_float8_all_gather``.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import after_initialization, local_tensor, set_gathers, write_gathered
from fsdp_runtime.errors import OptionError
from fsdp_runtime.wrap import hook_forward

logger = logging.getLogger(__name__)


def check_float8_gather(steps: Sequence[object], offload_policy: Any, dtype: torch.dtype | None) -> None:
    """Refuse a float8 gather of shards on the host, or into float16."""
    if not any(getattr(step, "gather", False) for step in steps):
        return
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise OptionError("Float8(gather=True) casts shards on the device: leave out offload_policy, or gather=True")
    if dtype is torch.float16:
        raise OptionError("Float8(gather=True) with param_dtype=torch.float16 would round small weights: use bfloat16")


class _Float8Gather:
    """The all-gather of one layer's weight."""

    def __init__(self, layer: Any, dtype: torch.dtype | None) -> None:
        self.layer, self.shard = layer, layer.weight
        self.dtype = dtype or layer.weight.dtype
        self.version = -1  # of the values that the layer's scale belongs to

    @property
    def is_stale(self) -> bool:
        """Whether FSDP2 gathers the weight in float8, and its scale belongs to earlier values."""
        return hasattr(local_tensor(self.shard), "fsdp_pre_all_gather") and self.version != self._version()

    def _version(self) -> int:
        return int(self.shard._version + local_tensor(self.shard)._version)

    def largest(self) -> Tensor:
        """Return the largest magnitude of the shard in the compute dtype, 0-d."""
        return local_tensor(self.shard).detach().abs().amax().to(self.dtype)

    def set_scale(self, scale: Tensor) -> None:
        """Set the scale of the full weight, in one tensor for compiled code."""
        if self.layer.weight_scale is None:
            self.layer.weight_scale = torch.empty_like(scale)
        self.layer.weight_scale.copy_(scale)
        self.version = self._version()

    def before(self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any) -> Any:
        """Cast the shard; FSDP2's ``fsdp_pre_all_gather``."""
        if self.is_stale:
            _agree_on_scales([self])
        scale, local = self.layer.weight_scale, local_tensor(self.shard).to(self.dtype)
        return (self.layer.layer.recipe.values_by(scale, local),), (scale,)

    def after(self, outputs: tuple[Tensor], scales: tuple[Tensor], dtype: Any, *, out: Tensor | None = None) -> Any:
        """Return the gathered weight, or write it to ``out``; FSDP2's ``fsdp_post_all_gather``."""
        values = (outputs[0].float() / scales[0]).to(dtype)
        return (values, (values,)) if out is None else write_gathered(out, values)


def gather_in_float8(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Gather the weights in float8 that have as many rows on every rank."""
    gathers: dict[nn.Module, _Float8Gather] = {}
    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "gathers_in_float8", False)]
    for layer in layers:
        tp = layer.layer.mesh.size() if layer.layer.sharded == 0 else 1
        if isinstance(layer.weight, DTensor) and layer.weight.shape[0] % (tp * mesh.size(mesh.ndim - 1)) == 0:
            gathers[layer] = _Float8Gather(layer, dtype)
    if not gathers:
        return

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def agree(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if stale := [gather for gather in gathers.values() if gather.is_stale]:
            _agree_on_scales(stale)

    hook_forward(model, "agrees on the scales of float8 weights", before=agree, first=True)
    after_initialization(model, lambda: set_gathers(model, gathers))
    logger.info("FSDP2: %d weights are gathered in float8", len(gathers))


@torch.inference_mode(False)
@torch.no_grad()
def _agree_on_scales(gathers: Sequence[_Float8Gather]) -> None:
    """Set the scales of weights from the largest magnitudes of all their shards."""
    by_mesh: dict[DeviceMesh, list[_Float8Gather]] = defaultdict(list)
    for gather in gathers:
        by_mesh[gather.shard.device_mesh].append(gather)
    for mesh, weights in by_mesh.items():
        largest = torch.stack([weight.largest() for weight in weights])
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        for weight, scale in zip(weights, weights[0].layer.layer.recipe.scale(largest).unbind(), strict=True):
            weight.set_scale(scale)
