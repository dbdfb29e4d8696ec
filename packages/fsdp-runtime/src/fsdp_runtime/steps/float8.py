"""Linear layers of the blocks multiply in float8, with torchao's casts and products.

A scale follows from the current tensor (dynamic scaling, arXiv:2209.05433, section 3): one for the tensor, a row or a
block.  The maximum of a tensor that is sharded over ``tp`` is the maximum over its ranks, and a shard holds whole
blocks, so ``tp`` does not change the scales.  Scales per block are of DeepSeek-V3 (arXiv:2412.19437, section 3.3), with
the casts of torchao 0.18's ``torchao.prototype.blockwise_fp8_training``, which needs Triton.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import ScalingType, pad, scaled_mm

from fsdp_runtime._torch_compat import has_values
from fsdp_runtime._torchao_compat import Float8Recipe, MXFP8Recipe, missing_units, require_torchao
from fsdp_runtime.errors import BackendError, ModelError, OptionError
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.values import require_bool, require_one_of
from fsdp_runtime.weights.quantize.formats import BLOCK, FP8, FP8_MAX, cell_amax
from fsdp_runtime.wrap import Wrapper, wrap
from tp_plans import ColwiseParallel, Plan, RowwiseParallel
from tp_plans.layouts import compute_ranges
from tp_plans.runtime import resolve_style
from tp_plans.styles import MLAKVProjection

logger = logging.getLogger(__name__)

#: The recipes; ``rowwise_with_gw_hp`` computes the gradients of weights in the layer's dtype.
Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
#: The dtypes that torchao casts to float8.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: The smallest maximum of a block; a block of zeros stays zero.
_LEAST = 1e-12
#: cuBLAS reads the scales of a weight in groups of this number.
_SCALE_GROUP = 4
#: The values in float8 ``[rows, summed]``, and their scales, one for a block.
Blocks = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LinearCasts:
    """The casts of a linear layer, and the dim of its weight ``[out, in]`` that is sharded over ``tp``."""

    recipe: Any  # a ``Float8Recipe``, ``BlockwiseRecipe`` or ``MXFP8Recipe``
    sharded: int | None = None
    mesh: DeviceMesh | None = None

    def product(self, left: tuple[Tensor, str], right: tuple[Tensor, str], scale: Tensor | None = None) -> Tensor:
        """Multiply two operands, a weight or ``[tokens, features]``, by the names of their casts."""
        rows, columns = self._cast(*left, None), self._cast(*right, scale)
        product: Tensor = self.recipe.product(rows, columns, left[0].dtype)
        return product

    def _cast(self, tensor: Tensor, operand: str, scale: Tensor | None) -> Any:
        if scale is not None:  # of a weight that FSDP2 gathered in float8
            return self.recipe.cast_by(scale, tensor, operand)
        return self.recipe.cast(tensor, operand, sharded=self._sharded_dim(operand), mesh=self.mesh)

    def _sharded_dim(self, operand: str) -> int | None:
        if self.sharded is None or operand.startswith("weight"):
            return self.sharded
        return 1 if self.sharded == (1 if operand.startswith("input") else 0) else None


@dataclass(frozen=True)
class Float8Layers:
    """The layers that multiply in float8, each with the dim of its weight that is sharded over ``tp``."""

    sharded: Mapping[str, int | None]
    kept: Mapping[str, str]  # matrices that keep their dtype, with the reason


class _Product(torch.autograd.Function):
    """``input @ weight.T`` of ``[tokens, in]`` and ``[out, in]``; each of the three products casts its operands."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, layer: LinearCasts, scale: Tensor | None) -> Tensor:  # noqa: A002
        ctx.save_for_backward(input, weight)
        ctx.layer, ctx.scale = layer, scale
        return layer.product((input, "input"), (weight, "weight"), scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        input, weight = ctx.saved_tensors  # noqa: A001
        layer: LinearCasts = ctx.layer
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            of_input = layer.product((gradient, "grad_output"), (weight, "weight_for_grad_input"), ctx.scale)
        if ctx.needs_input_grad[1]:
            of_weight = layer.product((gradient, "grad_output_for_grad_weight"), (input, "input_for_grad_weight"))
        return of_input, of_weight, None, None


class _InFloat8(Wrapper):
    effect: ClassVar[str] = "multiplies in float8"
    layer: ClassVar[LinearCasts]
    gathers_in_float8: ClassVar[bool]
    weight_scale: Tensor | None = None  # of a weight that FSDP2 gathered in float8

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        module: Any = self
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))  # noqa: A001
        rows = input.flatten(0, -2)
        count = rows.shape[0]
        if count == 0:  # of an expert without tokens
            return torch.nn.functional.linear(input, module.weight, module.bias)
        if missing := -count % self.layer.recipe.tokens:
            rows = pad(rows, (0, 0, 0, missing))
        rows = _Product.apply(rows, module.weight, self.layer, self.weight_scale)  # type: ignore[no-untyped-call]
        output: Tensor = rows[:count].unflatten(0, input.shape[:-1])
        return output if module.bias is None else output + module.bias.to(output.dtype)


@dataclass(frozen=True)
class BlockwiseRecipe:
    """The casts of ``"blockwise"``: a scale for 128 x 128 of a weight, and for 128 summed features of a token."""

    emulate: bool
    multiple: ClassVar[int] = BLOCK
    tokens: ClassVar[int] = BLOCK
    products: ClassVar[int] = 3

    def cast(self, tensor: Tensor, operand: str, *, sharded: int | None, mesh: DeviceMesh | None) -> Blocks:
        """Cast an operand; a shard holds whole blocks, so its scales need no other rank."""
        matrix = tensor.t() if "_for_" in operand else tensor
        cells = cell_amax(matrix, (0, 0), (BLOCK if operand.startswith("weight") else 1, BLOCK))
        scales = (FP8_MAX / cells.clamp(min=_LEAST).double()).float()
        values = (matrix * _per_element(scales, matrix)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return values.contiguous(), scales.reciprocal()

    def product(self, left: Blocks, right: Blocks, dtype: torch.dtype) -> Tensor:
        """Return ``left @ right.T``."""
        if self.emulate:
            values = [block.float() * _per_element(scales, block) for block, scales in (left, right)]
            return (values[0] @ values[1].t()).to(dtype)
        (rows, row_scales), (columns, column_scales) = left, right
        if square := len(column_scales) < len(columns):
            column_scales = pad(column_scales, (0, -column_scales.shape[1] % _SCALE_GROUP), value=1.0).contiguous().t()
        else:
            column_scales = column_scales.t().contiguous().t()
        return scaled_mm(
            rows,
            columns.t(),
            row_scales.t().contiguous().t(),
            ScalingType.BlockWise1x128,
            column_scales,
            ScalingType.BlockWise128x128 if square else ScalingType.BlockWise1x128,
            output_dtype=dtype,
        )


def _per_element(scales: Tensor, matrix: Tensor) -> Tensor:
    """Repeat the scale of each block for the elements of a matrix."""
    if len(scales) < len(matrix):
        scales = scales.repeat_interleave(BLOCK, 0)
    return scales.repeat_interleave(BLOCK, 1)


@dataclass(frozen=True)
class Float8(Step[Float8Layers]):
    """Multiply in float8 in the linear layers of the blocks; parameters and optimizer keep their dtype.

    Each call casts inputs, weights and the gradients of outputs, so saves, weight syncs and norms see the parameters as
    before.  Routers, norms, heads, embeddings, adapters and stacked experts keep their dtype.  So do layers with a size
    on a rank that is no multiple of 16 (``"blockwise"``: 128, ``"mxfp8"``: 32), and key and value projections if ranks
    of ``tp`` share a head.  ``describe_parallelism`` lists the layers that multiply in float8 in ``wrapped``, and the
    other matrices with the reason in ``not_quantized``.  Ranks of ``tp`` agree on every scale; ranks with other tokens
    (of ``dp`` or ``cp``) have scales for their own tokens, as in torchao.

    Args:
        recipe: the scales: ``"tensorwise"`` (one for a tensor; the fastest), ``"rowwise"`` (one for a row, a power of
            two), ``"rowwise_with_gw_hp"``, where the gradients of weights are computed in the layer's dtype,
            ``"blockwise"`` (DeepSeek-V3: one for 128 x 128 elements of a weight, and for 128 features of a token; on
            Hopper), or ``"mxfp8"`` (one for 32 elements, a power of two; on Blackwell, by a prototype of torchao).
        emulate: multiply the cast values in a dtype of the device, on any device and slowly: to test a recipe.
        gather: FSDP2 gathers weights of ``"tensorwise"`` in float8: half of bfloat16's bytes and equal products.  By
            default it gathers a weight in its dtype, before the cast.

    Raises:
        OptionError: a value is not allowed, or torchao is missing or too old.
        BackendError: the device has no units for the recipe.
        ModelError: no layer of the model can multiply in float8.

    Example:
        >>> import torch
        >>> from fsdp_runtime import MeshSpec, describe_parallelism, parallelize
        >>> from fsdp_runtime.steps import Float8
        >>> model = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(16, 32))]))
        >>> mesh = MeshSpec().build(device_type="cpu")
        >>> model = parallelize(model, mesh, steps=(Float8("tensorwise", emulate=True),))
        >>> describe_parallelism(model).wrapped["0.0.0"]
        ('multiplies in float8',)
    """

    recipe: Recipe = "tensorwise"
    emulate: bool = False
    gather: bool = False

    def __post_init__(self) -> None:
        require_one_of("recipe", self.recipe, get_args(Recipe))
        require_bool("emulate", self.emulate)
        require_bool("gather", self.gather)
        if self.gather and self.recipe != "tensorwise":
            raise OptionError(f"gather=True with {self.recipe!r}, which casts a weight twice: give 'tensorwise'")

    def check(self, setup: Setup) -> Float8Layers:
        """Return the layers that multiply in float8."""
        require_torchao(self.recipe)
        if setup.packed_base:
            raise OptionError("Float8 casts weights, and Quantized stores them as packed bytes: give one of the two")
        if not self.emulate:
            self._require_units(setup)
        sharded: dict[str, int | None] = {}
        rules, multiple = _rules(setup), self._casts().multiple
        kept = {
            path: "stacked experts have no float8 product"
            for block, module in setup.structure.blocks.items()
            for path, parameter in module.named_parameters(prefix=block)
            if parameter.ndim == 3 and "experts" in path
        }
        for path, layer in _linear_layers(setup):
            if reason := _reason_against(setup, path, layer, rules.get(path), multiple):
                kept[f"{path}.weight"] = reason
            else:
                sharded[path] = _sharded_dim(rules.get(path))
        reasons = dict(Counter(kept.values()))
        if not sharded:
            raise ModelError(
                f"Float8: no linear layer in the blocks of {setup.facts.name} can multiply in float8: {reasons}"
            )
        logger.info("float8: %d linear layers; matrices in their dtype: %s", len(sharded), reasons or "none")
        return Float8Layers(sharded, kept)

    def prepare(self, model: nn.Module, setup: Setup, checked: Float8Layers) -> None:
        """Wrap the layers; tensor parallelism then gives their forwards local inputs and weights."""
        casts = self._casts()
        for sharded in sorted({*checked.sharded.values()}, key=str):
            layer = LinearCasts(casts, sharded, None if sharded is None else setup.meshes.tp)
            paths = (path for path, dim in checked.sharded.items() if dim == sharded)
            wrap(map(model.get_submodule, paths), _InFloat8, layer=layer, gathers_in_float8=self.gather)
        runtime_state(model).not_quantized = checked.kept

    def _require_units(self, setup: Setup) -> None:
        parameter = next(setup.facts.model.parameters())
        # A dry run simulates a mesh, and its model has no values.
        dry_run = dist.is_initialized() and dist.get_backend() == "fake" and not has_values(parameter)
        meshes = (setup.meshes.tp, setup.meshes.fsdp, setup.meshes.cp, setup.meshes.ep)
        device = next((mesh.device_type for mesh in meshes if mesh is not None), parameter.device.type)
        if not dry_run and (gpus := missing_units(device, self.recipe)):
            raise BackendError(
                f"Float8({self.recipe!r}) needs a GPU with such units ({gpus}), and the model is on {device}: leave it "
                f"out, or test it slowly by Float8({self.recipe!r}, emulate=True)"
            )

    def _casts(self) -> Any:
        match self.recipe:
            case "blockwise":
                return BlockwiseRecipe(self.emulate)
            case "mxfp8":
                return MXFP8Recipe(self.emulate)
        return Float8Recipe.named(self.recipe, emulate=self.emulate)


def float8_products(module: nn.Module) -> int:
    """Return the number of a module's products in float8, of forward and the two gradients."""
    return int(module.layer.recipe.products) if isinstance(module, _InFloat8) else 0


def _rules(setup: Setup) -> Mapping[str, object]:
    if setup.meshes.tp is None or setup.plan is None:
        return {}
    if not isinstance(setup.plan, Plan):
        raise OptionError("Float8 reads each layer's sharding from a plan: give a tp_plans.Plan, not torch's styles")
    return setup.plan.by_path(setup.facts.model)


def _linear_layers(setup: Setup) -> Iterator[tuple[str, nn.Linear]]:
    """Iterate over the linear layers of the blocks: no adapters, and no layers beside stacked experts, which route."""
    model = setup.facts.model
    for block in setup.structure.blocks:
        for path, module in model.get_submodule(block).named_modules(prefix=block):
            parent = model.get_submodule(path.rpartition(".")[0])
            is_adapter = any(part.startswith("lora_") for part in path.split("."))
            if type(module).forward is nn.Linear.forward and not is_adapter and not hasattr(parent, "experts"):
                yield path, module


def _sharded_dim(style: object) -> int | None:
    if isinstance(style, RowwiseParallel):
        return 1
    return 0 if isinstance(style, ColwiseParallel | MLAKVProjection) else None


def _reason_against(setup: Setup, path: str, layer: nn.Linear, style: object, multiple: int) -> str:
    """Return the reason why a layer keeps its dtype, if any."""
    if layer.weight.dtype not in DTYPES:
        return f"float8 casts start from {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
    if any(size % multiple for size in layer.weight.shape):
        return f"a size is no multiple of {multiple}"
    if (dim := _sharded_dim(style)) is None:
        return ""
    size = layer.weight.shape[dim]
    shards = [*chain(*_shards(setup, path, style, size))]
    if any(edge % multiple for shard in shards for edge in (shard.start, shard.stop)):
        return f"a size on a rank of tp is no multiple of {multiple}"
    return "ranks of tp share key and value heads" if sum(map(len, shards)) > size else ""


def _shards(setup: Setup, path: str, style: Any, size: int) -> list[list[range]]:
    """Return the ranges of the sharded dim that each rank computes with."""
    pieces, shared = getattr(style, "fused_sizes", ()), getattr(style, "replicate_kv_heads", False)
    if not pieces and not shared:
        return compute_ranges(size, setup.tp)
    resolved: Any = resolve_style(style, setup.facts.model.get_submodule(path.rpartition(".")[0]))
    return compute_ranges(size, setup.tp, unit=resolved.multiple_of, pieces=resolved.fused_sizes, shared=shared)
