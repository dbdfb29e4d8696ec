"""FSDP2: each block is an FSDP module, gathered for its own forward and backward; all other parameters form the root.

Source of the method: PyTorch FSDP2 (``torch.distributed.fsdp.fully_shard``); Zhao et al., arXiv:2304.11277.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_runtime._torch_compat import has_forward
from fsdp_runtime._transformers_compat.models import keep_recording
from fsdp_runtime.errors import OptionError
from fsdp_runtime.memory.gathered_copies import gather_root_modules, keep_readers_on_shards, refuse_gradient_hooks
from fsdp_runtime.model.inference_mode import gather_outside_inference_mode
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.fsdp.dtypes import (
    FSDPDtypes,
    check_float8_gather,
    gather_in_float8,
    reduce_gradients,
    resolve_fsdp_dtypes,
)
from fsdp_runtime.steps.fsdp.missing_media import apply_absent_media
from fsdp_runtime.values import floating_dtype, require_bool, require_instance, require_one_of
from tp_plans.runtime import scale_expert_gradients

logger = logging.getLogger(__name__)


FrozenParams = Literal["layer", "root", "replicate"]
_POLICY = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"


@dataclass(frozen=True, kw_only=True)
class FSDP2(Step[FSDPDtypes]):
    """Wrap every block and then the model with ``fully_shard``.

    Args:
        mp_policy: dtypes of gathered parameters, reduced gradients and the model's outputs; ``None`` changes no
            dtype.
        master_dtype: dtype that trainable parameters are converted to before they are sharded, and so the dtype of
            gradients and optimizer state: ``torch.float32``, or a name such as ``"fp32"``, under an ``mp_policy`` that
            computes in a lower precision.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state on the CPU between uses, in
            pinned memory if the mesh is on an accelerator; ``None`` leaves them on the device.
        reshard_after_forward: free a block's gathered parameters after its forward.
        reshard_last_block: also free the parameters of the last block and of the root, which backward needs first.
        prefetch_forward: number of blocks to all-gather before the forward of the current one; 0 leaves the
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
        >>> from fsdp_runtime import FSDP2
        >>> policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        >>> fsdp = FSDP2(mp_policy=policy, master_dtype=torch.float32, prefetch_forward=1)
        >>> fsdp.requires_fsdp
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
        """``master_dtype`` as a torch dtype."""
        return floating_dtype("master_dtype", self.master_dtype)

    @property
    def requires_fsdp(self) -> bool:
        """True if a setting needs FSDP2 even where a single rank holds all shards."""
        return self.mp_policy is not None or isinstance(self.offload_policy, CPUOffloadPolicy)

    def check(self, setup: Setup) -> FSDPDtypes:
        """Check the options, and return the treatment that keeps the model's compute dtypes."""
        model, policy = setup.facts.model, self.mp_policy
        if self.master_dtype is not None and (policy is None or policy.param_dtype is None):
            raise OptionError(
                f"master_dtype={self.master_dtype} without a dtype to compute in: give mp_policy={_POLICY}"
            )
        _replicated_parameters(model, self)
        if setup.meshes.fsdp is None:
            return FSDPDtypes()
        refuse_gradient_hooks(model)
        check_float8_gather(setup.steps, self.offload_policy, policy.param_dtype if policy is not None else None)
        return resolve_fsdp_dtypes(
            model,
            setup.structure,
            wrapped=_blocks_to_wrap(model, setup.structure, self),
            experts=setup.expert_modules(model),
            over_tp=setup.tp > 1,
            policy=policy,
            stored_dtype=self.stored_dtype,
            shards_frozen=self.frozen_params != "replicate",
        )

    def apply(self, model: nn.Module, setup: Setup, checked: FSDPDtypes) -> None:
        """Wrap the modules; nothing changes where the mesh needs no FSDP2."""
        fsdp = self
        if self.gradient_divide_factor is None and setup.meshes.batches is not None:
            fsdp = replace(self, gradient_divide_factor=float(setup.meshes.batches))
        if setup.meshes.fsdp is not None:
            _apply(model, setup, setup.meshes.fsdp, fsdp, checked)


def _apply(model: nn.Module, setup: Setup, mesh: DeviceMesh, fsdp: FSDP2, dtypes: FSDPDtypes) -> None:
    # A block that shares a parameter with another module belongs to the root, because two FSDP modules cannot hold one
    # parameter; embedding and head belong to the root too, so a tied weight is gathered once.
    structure = setup.structure
    if (master_dtype := fsdp.stored_dtype) is not None:
        _convert_trainable(model, master_dtype)
    replicated = _replicated_parameters(model, fsdp) | {model.get_parameter(name) for name in dtypes.replicated}
    policy = fsdp.mp_policy or MixedPrecisionPolicy()
    casts = policy.cast_forward_inputs and dtypes.casts_block_inputs
    # Activations between blocks keep the compute dtype.
    block_policy = replace(policy, output_dtype=None, cast_forward_inputs=casts)
    offload_policy = fsdp.offload_policy or OffloadPolicy()
    if isinstance(offload_policy, CPUOffloadPolicy) and mesh.device_type == "cpu":  # memory is pinned for a device
        offload_policy = CPUOffloadPolicy(pin_memory=False)
    # Tokens and routing weights come in the dtypes that the block gave them.
    expert_policy = replace(block_policy, cast_forward_inputs=False)
    experts, expert_mesh = setup.expert_modules(model), setup.meshes.expert_fsdp

    def policy_of(path: str, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        return replace(policy, param_dtype=None) if path in dtypes.own_dtype else policy

    def shard(path: str, module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        shards = mesh.size(mesh.ndim - 1)  # the last axis shards, also under HSDP
        is_last = not path or f"{path}.".startswith(f"{structure.decoder[-1]}.")
        frees = fsdp.reshard_after_forward and (fsdp.reshard_last_block or not is_last)
        ignored = replicated | unshared
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy_of(path, policy),
            offload_policy=offload_policy,
            reshard_after_forward=frees,
            ignored_params=ignored | outer if path in blocks else ignored,
            shard_placement_fn=lambda parameter: _shard_placement(parameter, shards),
        )
        runtime_state(module).reshard_after_forward = frees
        if fsdp.gradient_divide_factor is not None:
            _divide_gradients(module, mesh.size() / fsdp.gradient_divide_factor)

    blocks, outer = _blocks_to_wrap(model, structure, fsdp), _outer_parameters(model, structure)
    unshared: set[nn.Parameter] = set()  # parameters of experts that no other rank has
    for path, module in experts.items():
        if expert_mesh is None or replicated.issuperset(module.parameters()):
            continue
        if _needs_fsdp2(module, expert_mesh, policy_of(path, expert_policy), offload_policy):
            shard(path, module, expert_mesh, expert_policy)
        else:
            unshared.update(module.parameters())
            scale_expert_gradients(module, 1 / (fsdp.gradient_divide_factor or 1))
    for path in dtypes.modules:
        # Their code casts its own inputs, and may return float32.
        shard(path, model.get_submodule(path), mesh, expert_policy)
    for path, block in blocks.items():
        shard(path, block, mesh, block_policy)
    shard("", model, mesh, policy)
    of_experts = {parameter for module in experts.values() for parameter in module.parameters()}
    for parameter in replicated - unshared:
        ranks = mesh if expert_mesh is None or parameter not in of_experts else expert_mesh
        reduce_gradients(parameter, ranks, fsdp.gradient_divide_factor or mesh.size())
    keep_recording(model)
    gather_outside_inference_mode(model)
    gather_in_float8(model, mesh, policy.param_dtype)
    keep_readers_on_shards(model)  # its hook runs before the float8 gather's
    runtime_state(model).is_fsdp_root = True
    gather_root_modules(model, structure, replicated)
    apply_absent_media(model, structure, mesh)
    _set_prefetching([blocks[path] for path in structure.decoder if path in blocks], experts.values(), fsdp)
    logger.info("FSDP2: %d blocks and the root over %d ranks", len(blocks), mesh.size())


def _needs_fsdp2(
    module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy
) -> bool:
    # On one rank FSDP2 would copy the parameters in every forward and backward, and the gradients.
    parameters = list(module.parameters())
    floating = [p for p in parameters if p.is_floating_point()]
    keeps_dtypes = all(
        dtype in (None, p.dtype) for p in floating for dtype in (policy.param_dtype, policy.reduce_dtype)
    )
    dispatched = all(isinstance(p, DTensor) for p in parameters)
    return mesh.size() > 1 or not (keeps_dtypes and dispatched) or isinstance(offload_policy, CPUOffloadPolicy)


def _divide_gradients(module: nn.Module, scale: float) -> None:
    # The mean is over the ranks that the module is sharded over: ``efsdp`` for experts, which get
    # the tokens of the ``ep`` ranks. FSDP2's own ``set_gradient_divide_factor`` needs NCCL, or a sum that it divides
    # twice where replicas have no shards (torch 2.11 to 2.15; pytorch/pytorch#155904, #162338).

    def rescale(gradients: torch.Tensor) -> None:
        gradients.mul_(scale)

    if isinstance(module, FSDPModule) and scale != 1:
        module.set_all_reduce_hook(rescale)


def _shard_placement(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Return the dim to shard a parameter on if it has fewer rows than ranks; ``None`` for rows, FSDP2's default."""
    # A rank of ``tp`` may hold one or two merged experts: sharded by rows, they would be on one or two ranks, and
    # the other ranks would hold nothing. FSDP2 shards dims other than the first into equal parts only.
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    sharded = [placement.dim for placement in getattr(parameter, "placements", ()) if isinstance(placement, Shard)]
    if local.ndim < 2 or local.shape[0] >= shards:
        return None
    end = local.ndim if local.is_floating_point() else local.ndim - 1  # not within the blocks of packed bytes
    free = (dim for dim in range(1, end) if dim not in sharded and local.shape[dim] % shards == 0)
    return next((Shard(dim) for dim in free), None)


def _replicated_parameters(model: nn.Module, fsdp: FSDP2) -> set[nn.Parameter]:
    """Return the parameters that ``frozen_params="replicate"`` keeps out of FSDP2; it does not convert their dtype."""
    if fsdp.frozen_params != "replicate":
        return set()
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    dtype = fsdp.mp_policy.param_dtype if fsdp.mp_policy is not None else None
    if mismatched := [n for n, p in frozen.items() if p.is_floating_point() and dtype not in (None, p.dtype)]:
        raise OptionError(
            f"frozen_params='replicate' keeps {len(mismatched)} parameters in their dtype, first {mismatched[0]} in "
            f"{frozen[mismatched[0]].dtype}, but mp_policy computes in {dtype}: convert them first"
        )
    return set(frozen.values())


def _blocks_to_wrap(model: nn.Module, structure: ModelStructure, fsdp: FSDP2) -> dict[str, nn.Module]:
    shared = _shared_parameters(model, structure)
    blocks: dict[str, nn.Module] = {}
    for path in structure.blocks:
        block = model.get_submodule(path)
        if not (parameters := list(block.parameters())):
            continue  # of another pipeline stage
        trains = any(parameter.requires_grad for parameter in parameters)
        if not shared.isdisjoint(parameters):
            logger.info("%s shares parameters with another module: part of the root", path)
        elif not has_forward(block):
            logger.info("%s has no forward, only parts that are called one by one: part of the root", path)
        elif trains or fsdp.frozen_params == "layer":
            blocks[path] = block
    return blocks


def _shared_parameters(model: nn.Module, structure: ModelStructure) -> set[nn.Parameter]:
    """Return the parameters of several modules, or of a module that is in several blocks and nowhere else."""
    owners = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    several = {parameter for parameter, count in owners.items() if count > 1}
    held = Counter(shared for path in structure.blocks for shared in set(model.get_submodule(path).parameters()))
    in_blocks = {parameter for parameter, count in held.items() if count > 1}
    return several | in_blocks - _outer_parameters(model, structure)


def _outer_parameters(model: nn.Module, structure: ModelStructure) -> set[nn.Parameter]:
    """Return the parameters of modules outside of blocks; a block may hold them too, as with VB-LoRA's vectors."""
    blocks = {model.get_submodule(path) for path in structure.blocks}
    parameters: set[nn.Parameter] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        parameters.update(module.parameters(recurse=False))
        waiting += [child for child in module.children() if child not in blocks]
    return parameters


def _set_prefetching(blocks: Sequence[nn.Module], experts: Iterable[nn.Module], fsdp: FSDP2) -> None:
    """Set the modules that FSDP2 gathers early; a block's experts are gathered while its attention runs."""
    expert_modules = set(experts)
    units: list[list[FSDPModule]] = [  # each block with its experts
        [m for m in block.modules() if isinstance(m, FSDPModule) and (m is block or m in expert_modules)]
        for block in blocks
        if isinstance(block, FSDPModule)
    ]
    for index, (block, *inside) in enumerate(units):
        if ahead := [*inside, *chain(*units[index + 1 : index + 1 + fsdp.prefetch_forward])]:
            block.set_modules_to_forward_prefetch(ahead)
        if fsdp.prefetch_backward > 1:
            earlier = units[max(0, index - fsdp.prefetch_backward) : index]
            block.set_modules_to_backward_prefetch([*chain(*reversed(earlier))])


def _convert_trainable(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in list(model.parameters()):
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != dtype:
            converted = nn.Parameter(parameter.detach().to(dtype))
            converted.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, converted)  # type: ignore[no-untyped-call]  # ties stay ties
