"""Linear layers of the blocks multiply in float8, with torchao's casts and products.

A scale follows from the current tensor (dynamic scaling, arXiv:2209.05433, section 3): one for the tensor, or one for
each row.  The maximum of a tensor that is sharded over ``tp`` is the maximum over its ranks, so ``tp`` does not change
the scales.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._torchao_compat import Float8Recipe, has_float8_units, require_torchao
from fsdp_runtime.errors import BackendError, ModelError, OptionError
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.values import require_bool, require_one_of
from fsdp_runtime.wrap import Wrapper, wrap
from tp_plans import ColwiseParallel, Plan, RowwiseParallel
from tp_plans.styles import MLAKVProjection

logger = logging.getLogger(__name__)

#: The recipes of torchao; ``rowwise_with_gw_hp`` computes the gradients of weights in the layer's dtype.
Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
#: Sizes of operands that float8 units take are multiples of this number.
MULTIPLE = 16


@dataclass(frozen=True)
class LinearCasts:
    """The casts of a linear layer, and the dim of its weight ``[out, in]`` that is sharded over ``tp``."""

    recipe: Float8Recipe
    sharded: int | None = None
    mesh: DeviceMesh | None = None

    def cast(self, tensor: Tensor, operand: str, *, axis: int) -> Tensor:
        """Cast an operand for a product that sums over ``axis``: the weight, or ``[tokens, features]``."""
        sharded = self.sharded
        if sharded is not None and not operand.startswith("weight"):
            of_inputs = operand.startswith("input")
            sharded = 1 if sharded == (1 if of_inputs else 0) else None
        return self.recipe.cast(tensor, operand, axis=axis, sharded=sharded, mesh=self.mesh)


class _Product(torch.autograd.Function):
    """``input @ weight.T`` of ``[tokens, in]`` and ``[out, in]``; each of the three products casts its operands."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, layer: LinearCasts) -> Tensor:  # noqa: A002
        ctx.save_for_backward(input, weight)
        ctx.layer = layer
        rows = layer.cast(input, "input", axis=1)
        return rows @ layer.cast(weight, "weight", axis=1).t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight = ctx.saved_tensors  # noqa: A001
        layer: LinearCasts = ctx.layer
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            rows = layer.cast(gradient, "grad_output", axis=1)
            of_input = rows @ layer.cast(weight, "weight_for_grad_input", axis=0)
        if ctx.needs_input_grad[1]:
            columns = layer.cast(gradient, "grad_output_for_grad_weight", axis=0)
            of_weight = columns.t() @ layer.cast(input, "input_for_grad_weight", axis=0)
        return of_input, of_weight, None


class _InFloat8(Wrapper):
    """Multiplies in float8."""

    effect: ClassVar[str] = "multiplies in float8"
    layer: ClassVar[LinearCasts]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        module: Any = self
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))  # noqa: A001
        rows = _Product.apply(input.flatten(0, -2), module.weight, self.layer)  # type: ignore[no-untyped-call]
        output: Tensor = rows.unflatten(0, input.shape[:-1])
        return output if module.bias is None else output + module.bias.to(output.dtype)


@dataclass(frozen=True)
class Float8(Step[dict[str, int | None]]):
    """Multiply in float8 in the linear layers of the blocks; parameters and optimizer keep their dtype.

    Each call casts inputs, weights and the gradients of outputs, so saves, weight syncs and norms see the parameters as
    before.  Routers, norms, heads, embeddings, adapters and stacked experts keep their dtype.  So do layers with a size
    on a rank that is no multiple of 16, and layers with features that ranks of ``tp`` share.  ``describe_parallelism``
    lists the layers that multiply in float8.  FSDP2 gathers a weight in its dtype, before the cast.  Ranks of ``tp``
    agree on every scale; ranks with other tokens (of ``dp`` or ``cp``) have scales for their own tokens, as in torchao.

    Args:
        recipe: the scales: ``"tensorwise"`` (one for a tensor; the fastest), ``"rowwise"`` (one for a row, a power of
            two), or ``"rowwise_with_gw_hp"``, where the gradients of weights are computed in the layer's dtype.
        emulate: multiply the cast values in float32, on any device and slowly: to test a recipe.

    Raises:
        OptionError: a value is not allowed, or torchao is missing or too old.
        BackendError: the device has no float8 units.
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

    def __post_init__(self) -> None:
        require_one_of("recipe", self.recipe, get_args(Recipe))
        require_bool("emulate", self.emulate)

    def check(self, setup: Setup) -> dict[str, int | None]:
        """Return the layers that multiply in float8, each with the dim of its weight that is sharded over ``tp``."""
        require_torchao()
        if setup.packed_base:
            raise OptionError("Float8 casts weights, and Quantized stores them as packed bytes: give one of the two")
        if not self.emulate and not has_float8_units(device := _device_type(setup)):
            raise BackendError(
                f"Float8 needs a GPU with float8 units (NVIDIA from compute capability 8.9, AMD from MI300), and the "
                f"model is on {device}: leave it out, or test it slowly by Float8({self.recipe!r}, emulate=True)"
            )
        layers: dict[str, int | None] = {}
        left, rules = Counter[str](), _rules(setup)
        for path, layer in _linear_layers(setup):
            sharded = _sharded_dim(rules.get(path))
            sizes = [size // setup.tp if dim == sharded else size for dim, size in enumerate(layer.weight.shape)]
            if reason := _reason_against(rules.get(path), sizes):
                left[reason] += 1
            else:
                layers[path] = sharded
        if not layers:
            raise ModelError(
                f"Float8: no linear layer in the blocks of {setup.facts.name} can multiply in float8: {dict(left)}"
            )
        logger.info("float8: %d linear layers; layers in their dtype: %s", len(layers), dict(left) or "none")
        return layers

    def prepare(self, model: nn.Module, setup: Setup, checked: dict[str, int | None]) -> None:
        """Wrap the layers; tensor parallelism then gives their forwards local inputs and weights."""
        recipe = Float8Recipe.named(self.recipe, emulate=self.emulate)
        for sharded in sorted({*checked.values()}, key=str):
            layer = LinearCasts(recipe, sharded, None if sharded is None else setup.meshes.tp)
            paths = (path for path, dim in checked.items() if dim == sharded)
            wrap(map(model.get_submodule, paths), _InFloat8, layer=layer)


def _rules(setup: Setup) -> Mapping[str, object]:
    """Return the styles of the layers over ``tp`` by path."""
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


def _reason_against(style: object, sizes: list[int]) -> str:
    """Return the reason why a layer with these local sizes keeps its dtype, if any."""
    if any(size % MULTIPLE for size in sizes):
        return f"a size on a rank is no multiple of {MULTIPLE}"
    return "ranks share its features" if getattr(style, "replicate_kv_heads", False) else ""


def _device_type(setup: Setup) -> str:
    meshes = (setup.meshes.tp, setup.meshes.fsdp, setup.meshes.cp, setup.meshes.ep)
    used = next((mesh.device_type for mesh in meshes if mesh is not None), None)
    return used or next(setup.facts.model.parameters()).device.type
