"""The settings of FSDP2, and their checks against a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_runtime.errors import OptionError
from fsdp_runtime.values import floating_dtype, require_bool, require_instance, require_one_of

FrozenParams = Literal["layer", "root", "replicate"]
_POLICY = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"


@dataclass(frozen=True, kw_only=True)
class FSDPOptions:
    """Settings of FSDP2: dtypes, offload, resharding, prefetching, frozen parameters.

    Args:
        mp_policy: dtypes of gathered parameters, reduced gradients and the model's outputs; ``None`` leaves every dtype
            as it is.
        master_dtype: dtype that trainable parameters are converted to before they are sharded, and so the dtype of
            gradients and optimizer state: ``torch.float32``, or a word as ``"fp32"``, under an ``mp_policy`` that
            computes in a lower precision.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state on the CPU between uses, in
            pinned memory if the mesh is on an accelerator; ``None`` leaves them on the device.
        reshard_after_forward: free a block's gathered parameters after its forward.
        reshard_last_block: also free those of the last block and of the root, which backward needs first.
        prefetch_forward: number of blocks whose all-gather starts before the forward of the current one; 0 leaves the
            overlap to the host running ahead of the device.
        prefetch_backward: the same in backward, at least 1, torch's default.
        frozen_params: treatment of parameters that need no gradient: ``"layer"`` shards them like all others,
            ``"root"`` adds blocks without trainable parameters to the root, which is gathered once a step, and
            ``"replicate"`` keeps every frozen parameter replicated, without communication.
        gradient_divide_factor: divisor of summed gradients, such as 1 for a loss that is already divided by its number
            of tokens; by default the number of ranks with different batches.

    Raises:
        OptionError: a value is not allowed.

    Example:
        >>> import torch
        >>> from torch.distributed.fsdp import MixedPrecisionPolicy
        >>> from fsdp_runtime import FSDPOptions
        >>> policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        >>> options = FSDPOptions(mp_policy=policy, master_dtype=torch.float32, prefetch_forward=1)
        >>> options.requires_fsdp
        True
    """

    mp_policy: MixedPrecisionPolicy | None = None
    master_dtype: torch.dtype | str | None = None
    offload_policy: OffloadPolicy | None = None
    reshard_after_forward: bool = True
    reshard_last_block: bool = False
    prefetch_forward: int = 0
    prefetch_backward: int = 1
    frozen_params: FrozenParams = "layer"
    gradient_divide_factor: float | None = None

    @classmethod
    def examples(cls) -> tuple[FSDPOptions, ...]:
        """Return options for tests that combine them."""
        offloaded, kept = cls(offload_policy=CPUOffloadPolicy()), cls(reshard_after_forward=False)
        return offloaded, kept, cls(reshard_last_block=True), cls(prefetch_forward=1), cls(frozen_params="replicate")

    def __post_init__(self) -> None:
        require_instance("mp_policy", self.mp_policy, MixedPrecisionPolicy, _POLICY)
        require_instance("offload_policy", self.offload_policy, OffloadPolicy, "CPUOffloadPolicy()")
        floating_dtype("master_dtype", self.master_dtype)
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            if isinstance(dtype := getattr(self.mp_policy, name, None), str):
                raise OptionError(f"{name}={dtype!r} of mp_policy: torch takes dtypes there, as {_POLICY}")
            floating_dtype(f"{name} of mp_policy", dtype)
        for name in ("reshard_after_forward", "reshard_last_block"):
            require_bool(name, getattr(self, name))
        require_one_of("frozen_params", self.frozen_params, get_args(FrozenParams))
        for name, minimum in (("prefetch_forward", 0), ("prefetch_backward", 1)):
            if type(depth := getattr(self, name)) is not int or depth < minimum:
                raise OptionError(f"{name}={depth!r}: give a number of blocks, {minimum} or more")
        factor = self.gradient_divide_factor
        if factor is not None and not (type(factor) in (int, float) and 0 < factor < math.inf):
            raise OptionError(f"gradient_divide_factor={factor!r}: give a positive number")

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """``master_dtype`` as torch's."""
        return floating_dtype("master_dtype", self.master_dtype)

    @property
    def requires_fsdp(self) -> bool:
        """True if a setting needs FSDP2 even where a single rank holds all shards."""
        return self.mp_policy is not None or isinstance(self.offload_policy, CPUOffloadPolicy)


def check_fsdp_options(model: nn.Module, options: FSDPOptions) -> None:
    """Check options against each other and against a model's dtypes."""
    policy = options.mp_policy
    if options.master_dtype is not None and (policy is None or policy.param_dtype is None):
        raise OptionError(
            f"master_dtype={options.master_dtype} without a dtype to compute in: give mp_policy={_POLICY}"
        )
    replicated_parameters(model, options)


def replicated_parameters(model: nn.Module, options: FSDPOptions) -> set[nn.Parameter]:
    """Return the parameters that ``frozen_params="replicate"`` keeps out of FSDP2; it does not convert their dtype."""
    if options.frozen_params != "replicate":
        return set()
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    dtype = options.mp_policy.param_dtype if options.mp_policy is not None else None
    mismatched = [name for name, parameter in frozen.items() if dtype is not None and parameter.dtype != dtype]
    if mismatched:
        raise OptionError(
            f"frozen_params='replicate' keeps {len(mismatched)} parameters in their dtype, first {mismatched[0]} in "
            f"{frozen[mismatched[0]].dtype}, but mp_policy computes in {dtype}: convert them first"
        )
    return set(frozen.values())
