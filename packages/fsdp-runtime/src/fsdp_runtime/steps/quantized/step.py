"""Quantize the frozen base of an adapted model: its linear layers and stacked experts become packed bytes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from fsdp_runtime._peft_compat import Place, places
from fsdp_runtime._transformers_compat.dtypes import kept_in_float32
from fsdp_runtime.errors import OptionError
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.quantized.compute import QuantizedExperts, QuantizedLinear
from fsdp_runtime.steps.refused_adapters import refuse_adapters
from fsdp_runtime.weights.quantize.formats import KEPT
from fsdp_runtime.weights.quantize.packed import PackedFormat, PackedKind, PackedWeight, pack_parameter
from fsdp_runtime.wrap import wrap
from tp_plans import Plan, RowwiseParallel, Shard
from tp_plans.model_tree import join, parent
from tp_plans.runtime import reads_below
from tp_plans.styles import parameter_layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantizedParts:
    """The weights to quantize, by path of the module and name, and the reason for each weight left alone."""

    weights: Mapping[tuple[str, str], PackedWeight]
    left_alone: Mapping[str, str]


@dataclass(frozen=True)
class Quantized(Step[QuantizedParts]):
    """Store the frozen linear layers and stacked experts of all blocks in 4 or 8 bits, under adapters that train.

    Each weight becomes a parameter of packed bytes ``[..., out, bytes]`` under the same name.  It is sharded
    over ``tp``, ``ep`` and ``dp_shard`` like the weight.  A layer dequantizes it in forward and again in backward, and
    keeps no copy.  The values are the same on every mesh, as no shard of ``tp`` cuts a block.
    :func:`fsdp_runtime.load_weights` quantizes the slices that a rank reads, or takes the codes of a quantized
    checkpoint.  Exports and weight syncs have the dequantized values, with adapters merged.

    ==========  ==============  =====================  ===============================================
    format      bits a weight   scale of a block       checkpoints with these codes
    ==========  ==============  =====================  ===============================================
    ``nf4``     4.5             float32, 64 elements   bitsandbytes
    ``int4``    4.5             and an offset, 128     GPTQ, AWQ, compressed-tensors, torchao
    ``mxfp4``   4.25            a power of two, 32     gpt-oss
    ``int8``    8.25            float32, 128 elements  bitsandbytes, compressed-tensors, torchao
    ``fp8``     8.25            float32, 128 elements  DeepSeek-V3's blocks, compressed-tensors, torchao
    ==========  ==============  =====================  ===============================================

    Embeddings, heads, norms, routers, modules that train, and layers with other code than ``nn.Linear`` keep their
    dtype; ``describe_parallelism(model).not_quantized`` lists the layers with the reason.

    Args:
        format: ``"nf4"``, ``"int4"``, ``"int8"``, ``"fp8"`` or ``"mxfp4"``.
        block_size: elements of a row that share a scale; ``None`` for the number in the table.
        keep: name patterns of further layers that keep their dtype.

    Raises:
        OptionError: a value is not allowed, nothing can be quantized, a shard would cut a block, or an adapter reads
            full weights.

    Example:
        >>> import peft
        >>> from torch import nn
        >>> from fsdp_runtime import MeshSpec, parallelize
        >>> from fsdp_runtime.steps import Quantized
        >>> base = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(64, 4))]))
        >>> model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
        >>> model = parallelize(model, MeshSpec().build(device_type="cpu"), steps=(Quantized("nf4"),))
        >>> base.get_submodule("0.0.0").base_layer.weight.shape
        torch.Size([4, 36])
    """

    format: PackedKind
    block_size: int | None = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        PackedFormat.of(self.format, self.block_size)
        keep: object = self.keep
        if not isinstance(keep, tuple) or not all(isinstance(pattern, str) for pattern in keep):
            raise OptionError(f"keep={self.keep!r}: give a tuple of patterns of names, such as ('*.down_proj',)")

    def resolve(self, setup: Setup) -> Setup:
        """Tell the other steps that frozen weights are packed bytes."""
        return replace(setup, packed_base=True)

    def check(self, setup: Setup) -> QuantizedParts:
        """Return the weights to quantize, on this mesh as on every other."""
        fmt = PackedFormat.of(self.format, self.block_size)
        weights: dict[tuple[str, str], PackedWeight] = {}
        left_alone: dict[str, str] = {}
        for place, name in _frozen_matrices(setup, left_alone):
            parameter, named = getattr(place.module, name), join(place.base, name)
            transposed = parameter.ndim == 3 and bool(getattr(place.module, "is_transposed", False))
            columns = parameter.shape[-2 if transposed else -1]
            patterns = [each for each in (*KEPT, *self.keep) if fnmatchcase(named, each)]
            patterns += [each for each in self.keep if fnmatchcase(place.base, each)]
            if patterns:
                left_alone[named] = f"its name matches {patterns[0]}"
            elif columns % fmt.block:
                left_alone[named] = f"its {columns} columns are not a multiple of block_size={fmt.block}"
            else:
                weights[place.path, name] = PackedWeight(fmt, tuple(parameter.shape), parameter.dtype, transposed)
        if not weights:
            listed = "; ".join(f"{name}: {reason}" for name, reason in list(left_alone.items())[:4])
            raise OptionError(
                f"{self!r} finds no weight to quantize ({listed or 'no linear layers in blocks'}): freeze the base, as "
                "peft.get_peft_model does, or take a smaller block_size"
            )
        for layer in setup.facts.adapters:
            if layer.odd and (layer.experts is not None or (join(layer.path, "base_layer"), "weight") in weights):
                refuse_adapters(layer.path, layer.odd)
        for (path, name), weight in weights.items():
            _require_whole_blocks(setup, join(path, name), weight)
        for named, parameter in setup.facts.base_model.named_parameters():
            if parameter.ndim > 1 and not parameter.requires_grad and tuple(named.rpartition(".")[::2]) not in weights:
                left_alone.setdefault(named.replace(".base_layer", ""), "it is no linear layer or stack of a block")
        return QuantizedParts(weights, left_alone)

    def prepare(self, model: nn.Module, setup: Setup, checked: QuantizedParts) -> None:
        """Pack the weights; tensor parallelism, ``ep`` and FSDP2 then shard the bytes."""
        modules = {path: setup.facts.base_model.get_submodule(path) for path, _ in checked.weights}
        for (path, name), weight in checked.weights.items():
            pack_parameter(modules[path], name, weight)
        for module in modules.values():
            wrap([module], QuantizedLinear if isinstance(module, nn.Linear) else QuantizedExperts)
        runtime_state(model).not_quantized = checked.left_alone
        logger.info("%s: %d weights, %d left alone", self, len(checked.weights), len(checked.left_alone))


def _frozen_matrices(setup: Setup, left_alone: dict[str, str]) -> Iterator[tuple[Place, str]]:
    """Yield the module and name of each weight in blocks that can be packed; note the reason for each other weight."""
    base = setup.facts.base_model
    blocks = {id(module) for block in setup.structure.blocks.values() for module in block.modules()}
    names = Counter(id(parameter) for _, parameter in base.named_parameters(remove_duplicate=False))
    float32 = kept_in_float32(base)
    inside = [place for place in places(base) if place.wrapper is None and id(place.module) in blocks]
    above = {place.base: type(place.module) for place in inside}
    stacks = {p.shape[0] for place in inside for p in place.module.parameters(recurse=False) if _is_stack(place, p)}
    for place in inside:
        is_linear = isinstance(place.module, nn.Linear)
        for name, parameter in place.module.named_parameters(recurse=False):
            if not parameter.is_floating_point() or not (
                _is_stack(place, parameter) or (is_linear and name == "weight" and parameter.ndim == 2)
            ):
                continue
            owner = above.get(parent(place.base), type(place.module))
            reasons = {
                "it trains": parameter.requires_grad,
                "it is tied": names[id(parameter)] > 1,
                "transformers keeps it in float32": join(place.path, name) in float32,
                "it is a router": is_linear and parameter.shape[0] in stacks,
                f"the code of {owner.__name__} reads it": reads_below(owner, place.base.rpartition(".")[2], name),
                f"{type(place.module).__name__} has other code than nn.Linear": is_linear
                and type(place.module).forward is not nn.Linear.forward,
            }
            if reason := next((reason for reason, applies in reasons.items() if applies), None):
                left_alone[join(place.base, name)] = reason
            else:
                yield place, name


def _is_stack(place: Place, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a stack of experts: of a module with several such stacks."""
    stacks = [each.shape[0] for each in place.module.parameters(recurse=False) if each.ndim == 3]
    return parameter.ndim == 3 and len(stacks) > 1 and stacks[0] > 1


def _require_whole_blocks(setup: Setup, path: str, weight: PackedWeight) -> None:
    """Refuse a rule that cuts a block, or that shards the dim of the blocks by pieces."""
    plan, tp, fmt, last = setup.plan, setup.tp, weight.format, len(weight.shape) - 1
    if plan is None or tp == 1:
        return
    if not isinstance(plan, Plan):
        raise OptionError(
            "Quantized needs a plan of tp_plans, and torch's styles were given: give a Plan, or plan='auto'"
        )
    inside = next(name for name, module in setup.facts.model.named_modules() if module is setup.facts.base_model)
    rules, full = plan.on_axis("tp"), join(inside, path)
    for style in (plan[pattern] for above in (full, parent(full)) for pattern in rules.match(above)):
        layout = parameter_layout(style, last + 1)
        dim = layout.dim % (last + 1) if isinstance(layout, Shard) else 0
        pieces = isinstance(style, RowwiseParallel) and bool(style.fused_sizes)
        whole = dim < last and not weight.transposed and not pieces
        if dim and not (whole or (dim == last and not pieces and weight.shape[dim] % (tp * fmt.block) == 0)):
            columns = weight.shape[dim]
            raise OptionError(
                f"{path} has {columns} columns, and each of tp={tp} ranks computes with {columns / tp:g} of them, not "
                f"with whole blocks of {fmt.block}{' of each of its pieces' if pieces else ''}: use a block_size that "
                f"divides {columns // tp}, keep=({path!r},), or a tp that divides {columns // fmt.block} blocks"
            )
