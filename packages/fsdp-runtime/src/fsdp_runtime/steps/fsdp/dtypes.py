"""Dtypes of parameters under FSDP2: routers in float32 inside a bfloat16 model, and weights gathered in float8.

FSDP2 needs one dtype for the trainable parameters of each module that it wraps, and casts all of them to
``MixedPrecisionPolicy.param_dtype``.  Models keep some parameters in float32 because their code computes with them in
float32.  Here these parameters keep their dtype, as in one process.  A large module of them becomes a separate FSDP
module.  All others stay replicated, as scalars do, and their gradients are reduced as FSDP2 reduces gradients.

FSDP2 gathers the weights of float8 layers in float8: half of bfloat16's bytes, and the same products.  A rank casts its
shard by the scale of the full weight.  A forward after an update all-reduces the maxima of all weights once.  The
gathered weight has the compute dtype and the values of float8, so that every other reader gets a plain tensor; the
layer casts it by the same scale, without another rounding.  Source of the method: torchao's
``enable_fsdp_float8_all_gather``.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import after_initialization, hook_gradient, local_tensor, set_gathers, write_gathered
from fsdp_runtime._transformers_compat.dtypes import kept_in_float32
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.sharded.collectives import all_reduce_over, ranks_of
from fsdp_runtime.wrap import hook_forward
from tp_plans.model_tree import ancestors

logger = logging.getLogger(__name__)

#: A module of parameters in another dtype is sharded from this number of elements on.  For a smaller module an
#: all-gather costs more than the memory.
SHARDED_FROM = 2**20


@dataclass(frozen=True)
class FSDPDtypes:
    """The treatment of parameters under FSDP2 that keeps the model's compute dtypes."""

    # A model already in the policy's dtype passes float32 to its blocks where its code needs float32 (rotary
    # angles, residual streams): these inputs are not cast.
    modules: tuple[str, ...] = ()  # paths of modules that become separate FSDP modules
    replicated: tuple[str, ...] = ()  # parameters that no data-parallel rank shards
    own_dtype: frozenset[str] = frozenset()  # FSDP modules in their parameters' dtype, whatever ``mp_policy``
    casts_block_inputs: bool = True


#: The storage dtype and the compute dtype of a parameter.
_Dtypes = tuple[torch.dtype, torch.dtype]


def resolve_fsdp_dtypes(
    model: nn.Module,
    structure: ModelStructure,
    *,
    wrapped: Iterable[str],
    experts: Iterable[str],
    over_tp: bool,
    policy: MixedPrecisionPolicy | None,
    stored_dtype: torch.dtype | None,
    shards_frozen: bool,
) -> FSDPDtypes:
    """Find the parameters that FSDP2 cannot hold with their neighbours; the model is not changed."""
    # ``wrapped`` and ``experts`` are paths of blocks, and of modules of experts, that become FSDP modules. ``over_tp``:
    # layers are sharded, and a parameter of one element may meet a DTensor: FSDP2 does not reduce its gradient
    # then. FSDP2 takes no parameter without a dim in any case.
    compute = policy.param_dtype if policy is not None else None
    dtypes = _dtypes(model, compute, stored_dtype, shards_frozen=shards_frozen)
    replicated = [name for name, each in model.named_parameters() if each.ndim == 0 or (over_tp and each.numel() == 1)]
    units: dict[str, dict[str, nn.Parameter]] = defaultdict(dict)  # by path of the FSDP module
    paths = {*wrapped, *experts}
    for name, parameter in model.named_parameters():
        if name in dtypes and name not in replicated:
            units[next((above for above in ancestors(name) if above in paths), "")][name] = parameter
    modules: list[str] = []
    own_dtype: set[str] = set()
    for path, parameters in units.items():
        main = _main(path, parameters, dtypes, structure)
        if main[1] == main[0] and compute not in (None, main[1]):
            own_dtype.add(path)
        others = {name for name, each in parameters.items() if not _fits(dtypes[name], main, trains=each.requires_grad)}
        if others and path in experts:
            first = {dtypes[name]: f"{name} in {parameters[name].dtype}" for name in reversed(list(parameters))}
            raise OptionError(
                f"FSDP2 needs one dtype for the trainable parameters of each module of experts, and {path} has "
                f"{' and '.join(reversed(first.values()))}: convert them to one dtype"
            )
        separate = dict(_separate(model, path, parameters, others, dtypes))
        modules += separate
        own_dtype |= separate.keys()
        covered = {name for names in separate.values() for name in names}
        replicated += [name for name in parameters if name in others - covered]
    casts = policy is None or policy.param_dtype != _dtype_of_most(
        each for each in model.parameters() if each.is_floating_point()
    )
    return FSDPDtypes(tuple(modules), tuple(replicated), frozenset(own_dtype), casts_block_inputs=casts)


def _dtypes(
    model: nn.Module, compute: torch.dtype | None, stored_dtype: torch.dtype | None, *, shards_frozen: bool
) -> dict[str, _Dtypes]:
    """Return the dtypes of trainable parameters, and of frozen parameters that a cast changes."""
    # FSDP2 gathers frozen parameters of any dtype together with others; only a policy casts them.
    floating = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
    trainable = {name: each for name, each in floating.items() if each.requires_grad}
    main, main_of_all = _dtype_of_most(trainable.values()), _dtype_of_most(floating.values())
    lower = compute in (torch.bfloat16, torch.float16)
    declared = kept_in_float32(model) if lower else frozenset()
    dtypes: dict[str, _Dtypes] = {}
    for name, parameter in floating.items():
        declares = name in declared and parameter.dtype == torch.float32
        if name in trainable:
            stored = stored_dtype or parameter.dtype
            keeps = compute is None or parameter.dtype != main or declares
            dtypes[name] = (stored, stored if keeps else compute or stored)
        elif lower and shards_frozen:
            keeps = declares or (parameter.dtype == torch.float32 != main_of_all)
            dtypes[name] = (parameter.dtype, parameter.dtype if keeps else compute or parameter.dtype)
    return dtypes


def _dtype_of_most(parameters: Iterable[nn.Parameter]) -> torch.dtype | None:
    return _most((parameter.dtype, parameter.numel()) for parameter in parameters)  # type: ignore[no-any-return]


def _most(sizes: Iterable[tuple[Any, int]]) -> Any:
    sums: dict[Any, int] = defaultdict(int)
    for key, size in sizes:
        sums[key] += size
    return max(sums, key=lambda key: sums[key], default=None)


def _main(
    path: str, parameters: Mapping[str, nn.Parameter], dtypes: Mapping[str, _Dtypes], structure: ModelStructure
) -> _Dtypes:
    """Return the most common dtypes of an FSDP module; the root has the dtypes of its head."""
    head = f"{structure.lm_head}.weight"
    if path == "" and head in parameters and parameters[head].requires_grad:
        return dtypes[head]
    trains = any(p.requires_grad for p in parameters.values())
    counted = ((dtypes[name], p.numel() * (p.requires_grad or not trains)) for name, p in parameters.items())
    return _most(counted)  # type: ignore[no-any-return]


def _fits(dtypes: _Dtypes, main: _Dtypes, *, trains: bool) -> bool:
    """Return True for a parameter that an FSDP module can hold; a frozen parameter may have any storage dtype."""
    return dtypes == main if trains else dtypes[1] == main[1]


def _separate(
    model: nn.Module,
    unit: str,
    parameters: Mapping[str, nn.Parameter],
    others: set[str],
    dtypes: Mapping[str, _Dtypes],
) -> Iterator[tuple[str, list[str]]]:
    """Yield the outermost modules of an FSDP module that are large and hold one other dtype."""
    done: set[str] = set()
    for path, module in model.get_submodule(unit).named_modules(prefix=unit) if others else ():
        names = [f"{path}.{name}" for name, _ in module.named_parameters()]
        is_outermost = path != unit and done.isdisjoint(ancestors(path))
        if not (is_outermost and names and others.issuperset(names)):
            continue
        if len({dtypes[name] for name in names}) == 1 and sum(parameters[n].numel() for n in names) >= SHARDED_FROM:
            done.add(path)
            yield path, names


def reduce_gradients(parameter: nn.Parameter, mesh: DeviceMesh, divisor: float) -> None:
    """Sum the gradient of a replicated parameter over FSDP2's mesh in every backward, and divide it."""
    # The hook gets the gradient of one backward before it is accumulated, so that accumulation over micro-batches is
    # right with and without ``set_requires_gradient_sync``. A parameter that is frozen now may be trained later.

    def reduce(gradient: Tensor) -> Tensor:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local = (local / divisor).contiguous()
        for axis in range(mesh.ndim):
            dist.all_reduce(local, group=mesh.get_group(axis))
        if not isinstance(gradient, DTensor):
            return local
        shape, stride = gradient.shape, gradient.stride()
        return DTensor.from_local(
            local, gradient.device_mesh, gradient.placements, run_check=False, shape=shape, stride=stride
        )

    hook_gradient(parameter, reduce)


def check_float8_gather(steps: Sequence[object], offload_policy: Any, dtype: torch.dtype | None) -> None:
    """Refuse a float8 gather of shards on the host, or into float16."""
    if not any(getattr(step, "gather", False) for step in steps):
        return
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise OptionError("Float8(gather=True) casts shards on the device: leave out offload_policy, or gather=True")
    if dtype is torch.float16:
        raise OptionError("Float8(gather=True) with param_dtype=torch.float16 would round small weights: use bfloat16")


class _Float8Gather:
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
        shards = [(local_tensor(weight.shard).detach(), weight.dtype) for weight in weights]
        largest = torch.stack([shard.abs().amax().to(dtype) for shard, dtype in shards])
        largest = all_reduce_over(ranks_of(mesh).groups, largest, dist.ReduceOp.MAX)
        for weight, scale in zip(weights, weights[0].layer.layer.recipe.scale(largest).unbind(), strict=True):
            weight.set_scale(scale)
