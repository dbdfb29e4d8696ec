"""torchao's casts to float8 and its float8 products (torchao 0.17 and 0.18).

torchao's public call, ``convert_to_float8_training``, replaces modules, and its modules take the scale of a tensor from
this rank's part alone.  The functions below are the parts of ``torchao.float8`` that its modules call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.errors import OptionError

#: The oldest release with the names that this module imports.
OLDEST = (0, 17)


def require_torchao() -> None:
    """Check that torchao is installed, and new enough."""
    try:
        from torchao import __version__
    except ImportError as error:
        raise OptionError("Float8 needs torchao: pip install 'fsdp-runtime[float8]'") from error
    release = tuple(int(part) for part in __version__.split("+")[0].split(".")[:2])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise OptionError(f"Float8 needs torchao {oldest} or later, and {__version__} is installed")


@dataclass(frozen=True)
class Float8Recipe:
    """The casts of a recipe of torchao, and the settings of its three products."""

    config: Any  # ``torchao.float8.Float8LinearConfig``
    products: Any  # ``LinearMMConfig``

    @classmethod
    def named(cls, name: str, *, emulate: bool) -> Float8Recipe:
        """Return torchao's recipe of this name; with ``emulate`` products run in float32 on any device."""
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        # The number of tokens is an inner dim of the weight's gradient, and seldom a multiple of 16.
        config = replace(Float8LinearConfig.from_recipe_name(name), emulate=emulate, pad_inner_dim=True)
        products = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
        return cls(config, LinearMMConfig(*(ScaledMMConfig(emulate, p.use_fast_accum, False, True) for p in products)))

    def cast(self, tensor: Tensor, operand: str, *, axis: int, sharded: int | None, mesh: DeviceMesh | None) -> Tensor:
        """Cast a matrix ``[rows, columns]`` to float8 for a product that sums over ``axis``.

        ``operand`` names a cast of torchao's config.  ``sharded`` is the dim that ranks of ``mesh`` share: their parts
        get the scale of the full tensor.
        """
        from torchao.float8.config import ScalingGranularity, ScalingType
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        cast = getattr(self.config, f"cast_config_{operand}")
        if cast.scaling_type is ScalingType.DISABLED:
            return tensor
        tensorwise = cast.scaling_granularity is ScalingGranularity.TENSORWISE
        agreed = mesh is not None and sharded is not None and (tensorwise or sharded == axis)
        role = next(role for role in GemmInputRole if operand.startswith(role.value))
        result: Tensor = hp_tensor_to_float8_dynamic(
            tensor,
            cast.target_dtype,
            self.products,
            reduce_amax=agreed,
            gemm_input_role=role,
            device_mesh=mesh if agreed else None,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(0 if axis == 0 else -1, cast.scaling_granularity),
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )
        return result


def has_float8_units(device_type: str) -> bool:
    """Return whether the accelerator of this machine multiplies in float8."""
    from torchao.utils import is_MI300, is_MI350, is_sm_at_least_89

    return device_type == "cuda" and bool(is_MI300() or is_MI350() if torch.version.hip else is_sm_at_least_89())
