"""Float8 layers: the numbers of torchao's own conversion, on one process and over tp."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch._inductor.utils  # asks for Triton, which a test below replaces
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_runtime._torchao_compat as compat
from coverage.packing import packed_positions
from coverage.table import coverage_entries, tiny_model
from fsdp_runtime import MeshSpec, describe_parallelism, parallelize, sequence_layout
from fsdp_runtime.errors import BackendError, ModelError, OptionError
from fsdp_runtime.meters import StepMeter
from fsdp_runtime.model.structure import inspect_model
from fsdp_runtime.steps import Compile, Float8, float8
from fsdp_runtime.steps.float8 import BlockwiseRecipe
from fsdp_runtime.wrap import wrap
from harness import models
from harness.models import tiny_inputs
from harness.parity import gradient_errors, mesh_for
from harness.ranks import RankPool
from tp_plans import plan_for

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: Norms of transformers compute in float32, and sum the gradients of their weights over ranks.
ROUNDING = 1e-6


def _largest_error(name: str, recipe: Any, axes: dict[str, int], **options: Any) -> float:
    """The largest relative error of a gradient against torchao's conversion of the same layers on one process."""
    model = _model(name).float()
    reference = copy.deepcopy(model)
    mesh = MeshSpec(**axes).build(device_type="cpu")
    parallelize(model, mesh, logits="full", steps=(Float8(recipe, emulate=True),), **options)
    _convert(reference, recipe, _layers(model))
    return _gradient_error(model, reference)


def _gradient_error(model: nn.Module, reference: nn.Module) -> float:
    dtype = next(reference.parameters()).dtype
    inputs = tiny_inputs(model, batch=2, length=16)  # MXFP8 fills other numbers of tokens up, torchao's layer does not
    inputs = {name: each.to(dtype) if each.is_floating_point() else each for name, each in inputs.items()}
    for each in (reference, model):
        each(**inputs, use_cache=False).logits.square().mean().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    return max(_error(expected[name], parameter.grad) for name, parameter in model.named_parameters())


@dataclass(frozen=True)
class _ExactSums:
    """A recipe's casts with products and sums in float64, so that the order of a sum moves no element to the next cast.

    In float32 a sum over ranks differs in its last bit, and a few elements of a later cast round to a neighbour.
    """

    recipe: Any
    multiple: int
    tokens: int

    def cast(self, tensor: torch.Tensor, operand: str, **sharding: Any) -> torch.Tensor:
        match self.recipe.cast(tensor.float(), operand, **sharding):
            case (values, scales):
                return values.double() * float8._per_element(scales, values)
            case MXTensor() as cast:
                return cast.dequantize(torch.float32).double()
            case Float8TrainingTensor() as cast:
                return cast._data.double() / cast._scale
        return tensor.t() if "_for_" in operand else tensor

    def product(self, left: torch.Tensor, right: torch.Tensor, _: torch.dtype) -> torch.Tensor:
        return left @ right.t()


@contextmanager
def _exact_sums() -> Iterator[None]:
    casts = Float8._casts

    def exact(step: Float8) -> _ExactSums:
        recipe = casts(step)
        return _ExactSums(recipe, recipe.multiple, recipe.tokens)

    with patch.object(Float8, "_casts", exact), patch.object(float8, "DTYPES", (torch.float64,)):
        yield


def _error_of_exact_sums(name: str, recipe: Any, axes: dict[str, int], **options: Any) -> float:
    """The largest relative error of a gradient against the same casts on one process."""
    model = _model(name).double()
    reference, step = copy.deepcopy(model), Float8(recipe, emulate=True)
    with _exact_sums():
        parallelize(model, MeshSpec(**axes).build(device_type="cpu"), logits="full", steps=(step,), **options)
        casts = float8.LinearCasts(step._casts())
        wrap(map(reference.get_submodule, _layers(model)), float8._InFloat8, layer=casts)
        return _gradient_error(model, reference)


def _model(name: str) -> nn.Module:
    if name == "vision":
        return models.tiny_model("Gemma3ForConditionalGeneration")
    if name != "wide":
        return tiny_model(coverage_entries()[name])
    torch.manual_seed(0)  # blocks of 128 elements on every rank
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=131))


def _convert(model: nn.Module, recipe: Any, layers: set[str]) -> None:
    """Convert layers as torchao does."""
    if recipe == "mxfp8":
        for path in layers:
            layer: Any = model.get_submodule(path)
            layer.__class__ = MXFP8Linear
            layer.kernel_preference, layer.wgrad_with_hp = KernelPreference.EMULATED, False
            layer.scale_calculation_mode = ScaleCalculationMode.RCEIL
    else:
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path in layers)


def _layers(model: nn.Module) -> set[str]:
    wrapped = describe_parallelism(model).wrapped
    layers = {path for path, effects in wrapped.items() if "multiplies in float8" in effects}
    assert layers
    return layers


def _error(expected: torch.Tensor | None, gradient: torch.Tensor | None) -> float:
    if expected is None or gradient is None:
        return 0.0 if expected is gradient else torch.inf
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return ((full - expected).norm() / expected.norm().clamp(min=1e-6)).item()


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_float8_on_one_process_equals_torchaos_conversion(recipe: str) -> None:
    assert _largest_error("qwen3", recipe, {}) == 0


@pytest.mark.parametrize("recipe", [*RECIPES, "blockwise", "mxfp8"])
def test_float8_multiplies_under_autocast(recipe: Any) -> None:
    model = _model("wide")
    parallelize(model, MeshSpec().build(device_type="cpu"), steps=(Float8(recipe, emulate=True),))
    inputs = tiny_inputs(model, batch=1, length=9)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**inputs, use_cache=False).logits
    logits.float().square().mean().backward()
    expected = _model("wide")(**inputs, use_cache=False).logits
    assert 0 < _error(expected, logits.float()) < 0.1
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "recipe"),
    [*itertools.product(["qwen3_next", "deepseek_v3", "phi3", "vision"], [*RECIPES, "mxfp8"]), ("wide", "blockwise")],
)
def test_float8_over_tp_equals_one_process(two_ranks: RankPool, name: str, recipe: str) -> None:
    for sequence_parallel in (False, True):
        run = (_error_of_exact_sums, name, recipe, {"tp": 2})
        assert max(two_ranks.run(*run, sequence_parallel=sequence_parallel)) < ROUNDING


def _error_of_packed_rows(name: str, axes: dict[str, int]) -> float:
    """The largest error of logits and gradients of packed rows; each token has its scales in this recipe."""
    model = _model(name).double()
    reference, step, mesh = copy.deepcopy(model), Float8("rowwise_with_gw_hp", emulate=True), mesh_for(axes)
    tokens = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(3))
    inputs = {"input_ids": tokens, "position_ids": packed_positions(((5, 4, 3), (3, 9)))}
    with _exact_sums():
        parallelize(model, mesh, logits="full", steps=(step,), packed_sequences=True)
        casts = float8.LinearCasts(step._casts())
        wrap(map(reference.get_submodule, _layers(model)), float8._InFloat8, layer=casts)
        parallelize(reference, mesh_for({"tp": 2}), plan=None, packed_sequences=True)
        expected: Any = reference(**inputs, use_cache=False).logits
        expected.square().sum().backward()
        layout = sequence_layout(mesh, tokens.shape[1])
        logits: Any = model(**{name: layout.shard(each) for name, each in inputs.items()}, use_cache=False).logits
        logits.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert torch.allclose(logits, layout.shard(expected), rtol=0, atol=1e-12)
    return max(gradient_errors(gradients, model).values())


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("qwen3", {"cp": 2}),
        pytest.param("deepseek_v3", {"cp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_float8_over_packed_rows_and_cp_equals_one_process(
    two_ranks: RankPool, name: str, axes: dict[str, int]
) -> None:
    assert max(two_ranks.run(_error_of_packed_rows, name, axes)) < ROUNDING


def _losses(axes: dict[str, int]) -> list[float]:
    model = _model("wide").double()
    mesh = MeshSpec(**axes).build(device_type="cpu")
    with _exact_sums():
        parallelize(model, mesh, logits="full", steps=(Float8(emulate=True),))
    assert len(_layers(model)) == 7
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(4):
        loss = model(**tiny_inputs(model, batch=2, length=9), use_cache=False).logits.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_float8_takes_the_same_steps_on_every_mesh(two_ranks: RankPool, four_ranks: RankPool) -> None:
    expected = _losses({})
    assert expected[-1] < 0.95 * expected[0]
    assert two_ranks.run(_losses, {"tp": 2})[0] == pytest.approx(expected, rel=1e-9)
    for axes in ({"tp": 4}, {"dp_shard": 2, "tp": 2}):  # both ranks of dp_shard have the same tokens
        assert four_ranks.run(_losses, axes)[0] == pytest.approx(expected, rel=1e-9)


def _kept(name: str, recipe: Any, tp: int) -> dict[str, str]:
    model = _model(name).float()
    setup: Any = SimpleNamespace(
        facts=SimpleNamespace(model=model, name=name),
        structure=inspect_model(model),
        plan=plan_for(model),
        meshes=SimpleNamespace(tp=tp),
        tp=tp,
        packed_base=False,
    )
    return {path.rpartition(".layers.0.")[2]: reason for path, reason in Float8(recipe, True).check(setup).kept.items()}


def test_float8_keeps_the_dtype_of_layers_with_shared_heads_or_cut_blocks() -> None:
    shared = "ranks of tp share key and value heads"
    heads = {f"self_attn.{name}_proj.weight": shared for name in "kv"}
    assert heads.items() <= _kept("qwen3", "tensorwise", 8).items()
    assert not any("self_attn" in path for path in _kept("wide", "blockwise", 2))
    with pytest.raises(ModelError, match="'a size on a rank of tp is no multiple of 128': 7"):
        _kept("wide", "blockwise", 8)
    # The ranges of a fused weight have 48 rows in each of two pieces: 96 are a multiple of 32, and 48 are not.
    assert "mlp.gate_up_proj.weight" not in _kept("phi3", "mxfp8", 1)
    assert "mlp.gate_up_proj.weight" in _kept("phi3", "mxfp8", 2)


def _error_without_agreement(name: str, recipe: str) -> float:
    agreeing = compat.Float8Recipe.cast
    compat.Float8Recipe.cast = lambda *args, sharded, **options: agreeing(*args, sharded=None, **options)  # type: ignore[method-assign]
    try:
        return _error_of_exact_sums(name, recipe, {"tp": 2})
    finally:
        compat.Float8Recipe.cast = agreeing  # type: ignore[method-assign]


def test_float8_scales_of_one_rank_change_gradients(two_ranks: RankPool) -> None:
    assert min(two_ranks.run(_error_without_agreement, "qwen3", "tensorwise")) > 1e-2


def test_float8_layers_compile_in_the_graph_of_their_block() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = Compile({"backend": backend, "fullgraph": True})
    assert _largest_error("qwen3", "tensorwise", {}, compile=compiled) == 0
    assert len(graphs) == 1


def _steps_of_fsdp(axes: dict[str, int], gather: bool, **options: Any) -> tuple[list[torch.Tensor], int]:
    """The parameters and gradients of two steps in bfloat16, and the bytes sent over dp_shard in the second."""
    model = _model("qwen3").bfloat16()
    mesh = MeshSpec(**axes).build(device_type="cpu")
    parallelize(model, mesh, logits="full", steps=(Float8(emulate=True, gather=gather),), **options)
    meter, optimizer = StepMeter(model, mesh), torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, tensors = tiny_inputs(model, batch=1, length=9), []
    for _ in range(2):
        with meter.step(lengths=[9], count_traffic=True):
            model(**inputs, use_cache=False).logits.float().square().mean().backward()
        gradients = [each.grad.full_tensor() for each in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        tensors += [*gradients, *(each.detach().full_tensor() for each in model.parameters())]
    return tensors, meter.last.bytes_sent["dp_shard"]


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_float8_gather_takes_the_same_steps_with_fewer_bytes(
    two_ranks: RankPool, four_ranks: RankPool, axes: dict[str, int]
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    for options in ({}, {"activation_checkpointing": "block"}):
        plain, cast = (pool.run(_steps_of_fsdp, axes, gather, **options)[0] for gather in (False, True))
        assert all(map(torch.equal, plain[0], cast[0]))
        assert cast[1] < 0.9 * plain[1]  # embedding, head and gradients have their dtype


def _torchaos_block_casts() -> Any:
    triton = MagicMock()  # the casts in torch's operators do not call it
    with patch.dict(sys.modules, {"triton": triton, "triton.language": triton.language}):
        from torchao.prototype.blockwise_fp8_training import kernels
    return kernels


def test_blockwise_casts_equal_torchaos() -> None:
    torchaos, recipe = _torchaos_block_casts(), BlockwiseRecipe(emulate=True)
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.randn(256, 384).to(dtype)
        columns, column_scales = torchaos.torch_blockwise_scale_act_quant_rhs(matrix)
        for operand, (values, scales) in {
            "grad_output": torchaos.torch_blockwise_scale_act_quant_lhs(matrix),
            "weight": torchaos.torch_blockwise_scale_weight_quant(matrix),
            "input_for_grad_weight": (columns.t(), column_scales.t()),
        }.items():
            cast = recipe.cast(matrix, operand, sharded=None, mesh=None)
            assert cast[0].view(torch.uint8).equal(values.contiguous().view(torch.uint8))
            assert cast[1].equal(scales)


def _scaled_product(*arguments: Any, output_dtype: torch.dtype) -> torch.Tensor:
    """Multiply as a GPU does, with torch's checks of sizes and strides."""
    empty = [
        torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device="meta")
        if isinstance(each, torch.Tensor)
        else each
        for each in arguments
    ]
    left, right, left_scales, _, right_scales, kind = arguments
    right_scales = right_scales.t()[:, : left_scales.shape[1]] if "128x128" in kind.name else right_scales
    values = [float8._per_element(*pair) for pair in ((left_scales, left), (right_scales, right.t()))]
    result = (values[0] * left.float() @ (values[1] * right.t().float()).t()).to(output_dtype)
    assert result.shape == functional.scaled_mm(*empty, output_dtype=output_dtype).shape
    return result


@pytest.mark.parametrize(("inputs", "outputs"), [(640, 256), (512, 512)])
def test_blockwise_products_of_a_gpu_equal_the_emulated_ones(
    monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int
) -> None:
    monkeypatch.setattr(float8, "scaled_mm", _scaled_product)
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, dtype=torch.bfloat16)
    rows = torch.randn(3, 60, inputs, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for emulate in (True, False):
        own = copy.deepcopy(layer)
        wrap([own], float8._InFloat8, layer=float8.LinearCasts(BlockwiseRecipe(emulate)))
        output = own(rows)
        results.append((output, *torch.autograd.grad(output.square().sum(), [rows, *own.parameters()])))
    for emulated, multiplied in zip(*results, strict=True):
        assert multiplied.equal(emulated)


def test_float8_keeps_the_dtype_of_routers_adapters_and_small_layers() -> None:
    model = tiny_model(coverage_entries()["qwen3_next"]).float()
    parallelize(model, MeshSpec().build(device_type="cpu"), steps=(Float8("mxfp8", emulate=True),))
    kept = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)} - _layers(model)
    assert {path.rpartition(".")[2] for path in kept} == {"lm_head", "shared_expert_gate", "in_proj_ba"}
    report = describe_parallelism(model)
    assert report.not_quantized["model.layers.0.linear_attn.in_proj_ba.weight"] == "a size is no multiple of 32"
    assert "2 not quantized: stacked experts have no float8 product" in str(report)


def test_float8_without_float8_units_names_the_emulation() -> None:
    with pytest.raises(BackendError, match=r"model is on cpu: .* Float8\('rowwise', emulate=True\)"):
        _parallelized(Float8("rowwise"))


def test_float8_of_unknown_recipes_or_old_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="recipe='columnwise': write one of 'tensorwise'"):
        Float8("columnwise")  # type: ignore[arg-type]
    monkeypatch.setattr(compat, "MX_RELEASE", (0, 19))
    with pytest.raises(OptionError, match=r"Float8\('mxfp8'\) needs torchao 0\.19"):
        _parallelized(Float8("mxfp8", emulate=True))
    monkeypatch.setattr(compat, "OLDEST", (99, 0))
    with pytest.raises(OptionError, match=r"needs torchao 99\.0 or later, and 0\."):
        _parallelized(Float8(emulate=True))


def test_float8_of_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="no linear layer in the blocks of Sequential can multiply in float8"):
        _parallelized(Float8(emulate=True), width=8)


def _parallelized(step: Float8, width: int = 16) -> nn.Module:
    model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(width, width))]))
    return parallelize(model, MeshSpec().build(device_type="cpu"), steps=(step,))
