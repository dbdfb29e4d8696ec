"""torchao's casts to float8 and its float8 products (torchao 0.17 and 0.18; MXFP8 in 0.18 only, a prototype there).

torchao's public call, ``convert_to_float8_training``, replaces modules, and its modules take the scale of a tensor from
this rank's part alone.  The functions below are the parts of ``torchao.float8`` that its modules call.  MXFP8 training
has no public call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.errors import OptionError

#: The oldest release with the names that this module imports.
OLDEST = (0, 17)
#: The release with the prototype of MXFP8 that this module calls.
MX_RELEASE = (0, 18)


def require_torchao(recipe: str) -> None:
    """Check that torchao is installed, and has the recipe."""
    try:
        from torchao import __version__
    except ImportError as error:
        raise OptionError("Float8 needs torchao: pip install 'fsdp-runtime[float8]'") from error
    release = tuple(int(part) for part in __version__.split("+")[0].split(".")[:2])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise OptionError(f"Float8 needs torchao {oldest} or later, and {__version__} is installed")
    if recipe == "mxfp8" and release != MX_RELEASE:
        needed = ".".join(map(str, MX_RELEASE))
        raise OptionError(
            f"Float8('mxfp8') needs torchao {needed}, where it is a prototype, and {__version__} is installed"
        )


@dataclass(frozen=True)
class Float8Recipe:
    """The casts of a recipe of torchao, and the settings of its three products."""

    config: Any  # ``torchao.float8.Float8LinearConfig``
    settings: Any  # ``LinearMMConfig``, of the three products
    multiple: ClassVar[int] = 16  # of the sizes of a weight
    tokens: ClassVar[int] = 1  # rows of inputs are filled up to a multiple

    @classmethod
    def named(cls, name: str, *, emulate: bool) -> Float8Recipe:
        """Return torchao's recipe of this name; with ``emulate`` products run in float32 on any device."""
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        # The number of tokens is an inner dim of the weight's gradient, and seldom a multiple of 16.
        config = replace(Float8LinearConfig.from_recipe_name(name), emulate=emulate, pad_inner_dim=True)
        products = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
        return cls(config, LinearMMConfig(*(ScaledMMConfig(emulate, p.use_fast_accum, False, True) for p in products)))

    @property
    def products(self) -> int:
        """The number of a layer's three products in float8."""
        from torchao.float8.config import ScalingType

        return 3 - (self.config.cast_config_input_for_grad_weight.scaling_type is ScalingType.DISABLED)

    def cast(self, tensor: Tensor, operand: str, *, sharded: int | None, mesh: DeviceMesh | None) -> Tensor:
        """Cast an operand ``[rows, columns]``, and put the dim last that its product sums over.

        ``operand`` names a cast of torchao's config.  ``sharded`` is the dim that ranks of ``mesh`` share: their parts
        get the scale of the full tensor.
        """
        from torchao.float8.config import ScalingGranularity, ScalingType
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        cast, axis = getattr(self.config, f"cast_config_{operand}"), 0 if "_for_" in operand else 1
        if cast.scaling_type is ScalingType.DISABLED:
            return tensor.t() if axis == 0 else tensor
        tensorwise = cast.scaling_granularity is ScalingGranularity.TENSORWISE
        agreed = mesh is not None and sharded is not None and (tensorwise or sharded == axis)
        role = next(role for role in GemmInputRole if operand.startswith(role.value))
        result: Tensor = hp_tensor_to_float8_dynamic(
            tensor,
            cast.target_dtype,
            self.settings,
            reduce_amax=agreed,
            gemm_input_role=role,
            device_mesh=mesh if agreed else None,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(0 if axis == 0 else -1, cast.scaling_granularity),
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )
        return result.t() if axis == 0 else result

    def scale(self, largest: Tensor) -> Tensor:
        """Return the scales of weights with these largest magnitudes."""
        from torchao.float8.float8_utils import amax_to_scale

        cast = self.config.cast_config_weight
        scale: Tensor = amax_to_scale(largest, cast.target_dtype, self.config.round_scales_to_power_of_2)
        return scale

    def cast_by(self, scale: Tensor, weight: Tensor, operand: str) -> Any:
        """Cast a weight by the scale of the full weight, as :meth:`cast` does."""
        from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

        dtype, role = self.config.cast_config_weight.target_dtype, GemmInputRole.WEIGHT
        result = hp_tensor_and_scale_to_float8(weight, scale, dtype, self.settings, role)
        return result.t() if "_for_" in operand else result

    def values_by(self, scale: Tensor, weight: Tensor) -> Tensor:
        """Return the float8 values of a weight, without their scale."""
        values: Tensor = self.cast_by(scale, weight, "weight")._data
        return values

    def product(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``left @ right.T``."""
        return left @ right.t()


@dataclass(frozen=True)
class MXFP8Recipe:
    """torchao's MXFP8: a scale, a power of two, for 32 elements along the dim that a product sums over."""

    emulate: bool
    multiple: ClassVar[int] = 32
    tokens: ClassVar[int] = 32
    products: ClassVar[int] = 3

    def cast(self, tensor: Tensor, operand: str, *, sharded: int | None, mesh: DeviceMesh | None) -> Tensor:
        """Cast an operand; a shard holds whole groups of 32 elements, so its scales need no other rank."""
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        matrix = (tensor.t() if "_for_" in operand else tensor).contiguous()
        kernels = KernelPreference.EMULATED if self.emulate else KernelPreference.AUTO
        result: Tensor = MXTensor.to_mx(
            matrix, torch.float8_e4m3fn, self.multiple, ScaleCalculationMode.RCEIL, kernel_preference=kernels
        )
        return result

    def product(self, left: Any, right: Any, dtype: torch.dtype) -> Tensor:
        """Return ``left @ right.T``; torchao's product on a GPU has the dtype bfloat16."""
        if self.emulate:  # under autocast a weight has another dtype
            left, right = left.dequantize(dtype), right.dequantize(dtype)
        product: Tensor = (left @ right.t()).to(dtype)
        return product


def missing_units(device_type: str, recipe: str) -> str:
    """Return the GPUs that multiply by a recipe if this machine's accelerator is none of them."""
    from torchao.utils import is_MI300, is_MI350, is_sm_at_least_89, is_sm_at_least_90, is_sm_at_least_100

    hopper, blackwell = is_sm_at_least_90() and not is_sm_at_least_100(), is_sm_at_least_100()
    amd = bool(torch.version.hip)
    gpus, present = {
        "blockwise": ("NVIDIA Hopper, compute capability 9.0", hopper and not amd),
        "mxfp8": ("NVIDIA Blackwell, compute capability 10.0", blackwell and not amd),
    }.get(
        recipe,
        (
            "NVIDIA from compute capability 8.9, AMD from MI300",
            is_MI300() or is_MI350() if amd else is_sm_at_least_89(),
        ),
    )
    return "" if device_type == "cuda" and present else gpus
