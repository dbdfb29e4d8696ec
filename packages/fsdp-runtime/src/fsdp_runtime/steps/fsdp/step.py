"""FSDP2: each block is an FSDP module, gathered for its own forward and backward; all other parameters form the root.

Source of the method: PyTorch FSDP2 (``torch.distributed.fsdp.fully_shard``); Zhao et al., arXiv:2304.11277.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_runtime._torch_compat import has_forward, initialize_root, own_parameters
from fsdp_runtime._transformers_compat.models import keep_recording
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.memory.gathered_copies import keep_readers_on_shards, refuse_gradient_hooks
from fsdp_runtime.model.inference_mode import gather_outside_inference_mode, leave_inference_mode
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.experts.step import expert_modules
from fsdp_runtime.steps.fsdp.dtypes import FSDPDtypes, reduce_gradients, resolve_fsdp_dtypes
from fsdp_runtime.steps.fsdp.missing_media import apply_absent_media
from fsdp_runtime.steps.fsdp.options import FSDPOptions, check_fsdp_options, replicated_parameters
from fsdp_runtime.wrap import hook_forward
from tp_plans.runtime import scale_expert_gradients

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FSDP2(Step):
    """Wrap every block and then the model with ``fully_shard``.

    Args:
        options: dtypes, offload, resharding, prefetching, frozen parameters.

    Raises:
        OptionError: the options are not ``FSDPOptions``.
    """

    options: FSDPOptions = field(default_factory=FSDPOptions)

    @classmethod
    def examples(cls) -> tuple[Step, ...]:
        """Return steps for tests that combine options."""
        return tuple(map(cls, FSDPOptions.examples()))

    def __post_init__(self) -> None:
        if not isinstance(self.options, FSDPOptions):
            raise OptionError(f"fsdp is of type {type(self.options).__name__}, not FSDPOptions")

    def check(self, setup: Setup) -> FSDPDtypes:
        """Check the options, and return how the dtypes that the model computes in are kept."""
        model = setup.facts.model
        check_fsdp_options(model, self.options)
        if setup.meshes.fsdp is None:
            return FSDPDtypes()
        refuse_gradient_hooks(model)
        blocks = _blocks_to_wrap(model, setup.structure, self.options)
        experts = expert_modules(model, setup.expert_plan)
        return resolve_fsdp_dtypes(
            model, setup.structure, self.options, wrapped=blocks, experts=experts, over_tp=setup.tp > 1
        )

    def apply(self, model: nn.Module, setup: Setup, found: FSDPDtypes) -> None:
        """Wrap the modules; nothing changes where the mesh needs no FSDP2."""
        options = self.options
        if options.gradient_divide_factor is None and setup.meshes.batches is not None:
            options = replace(options, gradient_divide_factor=float(setup.meshes.batches))
        if setup.meshes.fsdp is not None:
            _apply(model, setup, setup.meshes.fsdp, options, found)


def _apply(model: nn.Module, setup: Setup, mesh: DeviceMesh, options: FSDPOptions, dtypes: FSDPDtypes) -> None:
    """Wrap every block and then the model with ``fully_shard``, in place."""
    # A block that shares a parameter with another module belongs to the root, because two FSDP modules cannot hold one
    # parameter; embedding and head belong to the root too, so a tied weight is gathered once.
    structure = setup.structure
    if (master_dtype := options.stored_dtype) is not None:
        _convert_trainable(model, master_dtype)
    replicated = replicated_parameters(model, options) | {model.get_parameter(name) for name in dtypes.replicated}
    policy = options.mp_policy or MixedPrecisionPolicy()
    casts = policy.cast_forward_inputs and dtypes.casts_block_inputs
    # Activations between blocks keep the compute dtype.
    block_policy = replace(policy, output_dtype=None, cast_forward_inputs=casts)
    offload_policy = options.offload_policy or OffloadPolicy()
    if isinstance(offload_policy, CPUOffloadPolicy) and mesh.device_type == "cpu":  # memory is pinned for a device
        offload_policy = CPUOffloadPolicy(pin_memory=False)
    # Tokens and routing weights come in the dtypes that the block gave them.
    expert_policy = replace(block_policy, cast_forward_inputs=False)
    experts, expert_mesh = expert_modules(model, setup.expert_plan), setup.meshes.expert_fsdp

    def policy_of(path: str, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        return replace(policy, param_dtype=None) if path in dtypes.own_dtype else policy

    def shard(
        path: str, module: nn.Module, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy, reshard_after_forward: bool
    ) -> None:
        shards = mesh.size(mesh.ndim - 1)  # the last axis shards, also under HSDP
        ignored = replicated | unshared
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy_of(path, policy),
            offload_policy=offload_policy,
            reshard_after_forward=reshard_after_forward,
            ignored_params=ignored | outer if path in blocks else ignored,
            shard_placement_fn=lambda parameter: _shard_placement(parameter, shards),
        )
        runtime_state(module).reshard_after_forward = reshard_after_forward
        if options.gradient_divide_factor is not None:
            _divide_gradients(module, mesh.size() / options.gradient_divide_factor)

    def frees(path: str) -> bool:
        is_last = f"{path}.".startswith(f"{structure.decoder[-1]}.")
        return options.reshard_after_forward and (options.reshard_last_block or not is_last)

    blocks, outer = _blocks_to_wrap(model, structure, options), _outer_parameters(model, structure)
    unshared: set[nn.Parameter] = set()  # of experts that no other rank has
    for path, module in experts.items():
        if expert_mesh is None or replicated.issuperset(module.parameters()):
            continue
        if _needs_fsdp2(module, expert_mesh, policy_of(path, expert_policy), offload_policy):
            shard(path, module, expert_mesh, policy=expert_policy, reshard_after_forward=frees(path))
        else:
            unshared.update(module.parameters())
            scale_expert_gradients(module, 1 / (options.gradient_divide_factor or 1))
    for path in dtypes.modules:
        # Their code casts its own inputs, and may return float32.
        shard(path, model.get_submodule(path), mesh, policy=expert_policy, reshard_after_forward=frees(path))
    for path, block in blocks.items():
        shard(path, block, mesh, policy=block_policy, reshard_after_forward=frees(path))
    reshards_root = options.reshard_after_forward and options.reshard_last_block
    shard("", model, mesh, policy=policy, reshard_after_forward=reshards_root)
    of_experts = {parameter for module in experts.values() for parameter in module.parameters()}
    for parameter in replicated - unshared:
        ranks = mesh if expert_mesh is None or parameter not in of_experts else expert_mesh
        reduce_gradients(parameter, ranks, options.gradient_divide_factor or mesh.size())
    keep_recording(model)
    gather_outside_inference_mode(model)
    keep_readers_on_shards(model)
    runtime_state(model).is_fsdp_root = True
    _require_root_forward(model, structure, replicated)
    apply_absent_media(model, structure, mesh)
    _set_prefetching([blocks[path] for path in structure.decoder if path in blocks], experts.values(), options)
    logger.info("FSDP2: %d blocks and the root over %d ranks", len(blocks), mesh.size())


def _needs_fsdp2(
    module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy
) -> bool:
    """Return whether experts are on several ranks, cast or offloaded."""
    # On one rank FSDP2 would copy the parameters in every forward and backward, and the gradients.
    parameters = list(module.parameters())
    kept = all(
        dtype in (None, each.dtype) for each in parameters for dtype in (policy.param_dtype, policy.reduce_dtype)
    )
    dispatched = all(isinstance(each, DTensor) for each in parameters)
    return mesh.size() > 1 or not (kept and dispatched) or isinstance(offload_policy, CPUOffloadPolicy)


def _require_root_forward(model: nn.Module, structure: ModelStructure, replicated: set[nn.Parameter]) -> None:
    """Gather the root for a call of its own modules (embedding, norm, head) alone, or refuse one with gradients."""
    # Modules inside blocks are left alone, so that compiled blocks do not trace the check.
    blocks = {module for path in structure.blocks for module in model.get_submodule(path).modules()}
    for path, module in model.named_modules():
        own = {name: each for name, each in module.named_parameters(recurse=False) if each not in replicated}
        sharded = {name: each.device_mesh.ndim for name, each in own.items() if isinstance(each, DTensor)}
        if sharded and module is not model and module not in blocks:
            alone = _GatheredAlone(model, path, sharded)
            effect = "gathers FSDP2's root where it is called alone"
            hook_forward(module, effect, before=alone.gather, after=alone.free, first=True, always=True)


class _GatheredAlone:
    """Hooks around a module of the root, which its own forward has gathered, and ``generate`` may call before."""

    def __init__(self, root: Any, path: str, sharded: dict[str, int]) -> None:
        self.root, self.path = root, path
        self.sharded = sharded  # the number of axes of each parameter's mesh: the one over ``tp`` keeps one gathered
        self.is_alone = False

    def gather(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        own = own_parameters(module)
        if not any(_mesh_ndim(own.get(name)) == ndim for name, ndim in self.sharded.items()):
            return  # gathered ones lack FSDP2's axes
        if torch.is_grad_enabled():
            raise ModelError(
                f"{self.path} is called outside of the model's own forward, where FSDP2 keeps its parameters sharded: "
                "call the model, or forward_with_lm_head(model, function, ...) for a loss on hidden states, or call it "
                "without gradients"
            )
        initialize_root(self.root)
        self.is_alone = True
        with leave_inference_mode():  # FSDP2 keeps the tensors that it allocates
            self.root.unshard()

    def free(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.is_alone:
            self.is_alone = False
            self.root.reshard()


def _mesh_ndim(parameter: Any) -> int:
    return parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0


def _divide_gradients(module: nn.Module, scale: float) -> None:
    """Multiply the mean that FSDP2 reduces for one FSDP module by ``scale``."""
    # The mean is over the ranks that the module is sharded over: those of ``efsdp`` for experts, to which the tokens of
    # ``ep`` ranks were sent. FSDP2's own ``set_gradient_divide_factor`` needs NCCL, or a sum that it divides twice
    # where replicas have no shards (torch 2.10 to 2.15; pytorch/pytorch#155904, #162338).

    def rescale(gradients: torch.Tensor) -> None:
        gradients.mul_(scale)

    if isinstance(module, FSDPModule) and scale != 1:
        module.set_all_reduce_hook(rescale)


def _shard_placement(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Return the dim to shard a parameter on if it has fewer rows than ranks; ``None`` for rows, FSDP2's default."""
    # A rank of ``tp`` may hold one or two merged experts: sharded by rows they would be on as many ranks, and the other
    # ranks would hold nothing. FSDP2 shards dims other than the first into equal parts only.
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    sharded = [placement.dim for placement in getattr(parameter, "placements", ()) if isinstance(placement, Shard)]
    if local.ndim < 2 or local.shape[0] >= shards:
        return None
    free = (dim for dim in range(1, local.ndim) if dim not in sharded and local.shape[dim] % shards == 0)
    return next((Shard(dim) for dim in free), None)


def _blocks_to_wrap(model: nn.Module, structure: ModelStructure, options: FSDPOptions) -> dict[str, nn.Module]:
    """Return the blocks that become FSDP modules, by path."""
    shared = _shared_parameters(model, structure)
    found: dict[str, nn.Module] = {}
    for path in structure.blocks:
        block = model.get_submodule(path)
        parameters = list(block.parameters())
        trains = any(parameter.requires_grad for parameter in parameters)
        if not shared.isdisjoint(parameters):
            logger.info("%s shares parameters with another module: part of the root", path)
        elif not has_forward(block):
            logger.info("%s has no forward, only parts that are called one by one: part of the root", path)
        elif trains or options.frozen_params == "layer":
            found[path] = block
    return found


def _shared_parameters(model: nn.Module, structure: ModelStructure) -> set[nn.Parameter]:
    """Return the parameters that several modules hold, or a module that is in several blocks and nowhere else."""
    owners: dict[nn.Parameter, int] = defaultdict(int)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter] += 1
    several = {parameter for parameter, count in owners.items() if count > 1}
    held = Counter(each for path in structure.blocks for each in set(model.get_submodule(path).parameters()))
    in_blocks = {parameter for parameter, count in held.items() if count > 1}
    return several | in_blocks - _outer_parameters(model, structure)


def _outer_parameters(model: nn.Module, structure: ModelStructure) -> set[nn.Parameter]:
    """Return the parameters of modules outside of blocks, which may be in blocks too, as the vectors of VB-LoRA are."""
    blocks = {model.get_submodule(path) for path in structure.blocks}
    found: set[nn.Parameter] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        found.update(module.parameters(recurse=False))
        waiting += [child for child in module.children() if child not in blocks]
    return found


def _set_prefetching(blocks: Sequence[nn.Module], experts: Iterable[nn.Module], options: FSDPOptions) -> None:
    """Tell FSDP2 what to gather early; a block's experts are gathered while its attention runs."""
    own = set(experts)
    wrapped: list[FSDPModule] = []
    inside: list[list[FSDPModule]] = []
    for block in blocks:
        if isinstance(block, FSDPModule):
            wrapped.append(block)
            inside.append([part for part in block.modules() if part in own and isinstance(part, FSDPModule)])
    for index, module in enumerate(wrapped):
        ahead = list(inside[index])
        for later in range(index + 1, min(index + 1 + options.prefetch_forward, len(wrapped))):
            ahead += [wrapped[later], *inside[later]]
        if ahead:
            module.set_modules_to_forward_prefetch(ahead)
        if options.prefetch_backward > 1:
            before = range(index - 1, max(0, index - options.prefetch_backward) - 1, -1)
            module.set_modules_to_backward_prefetch([part for i in before for part in (wrapped[i], *inside[i])])


def _convert_trainable(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in list(model.parameters()):
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != dtype:
            converted = nn.Parameter(parameter.detach().to(dtype))
            converted.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, converted)  # type: ignore[no-untyped-call]  # ties stay ties
