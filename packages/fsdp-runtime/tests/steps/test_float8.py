"""Float8 layers: the numbers of torchao's own conversion, on one process and over tp."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import fsdp_runtime._torchao_compat as compat
from coverage.table import coverage_entries, tiny_model
from fsdp_runtime import MeshSpec, describe_parallelism, parallelize
from fsdp_runtime.errors import BackendError, ModelError, OptionError
from fsdp_runtime.steps import Compile, Float8
from harness.models import tiny_inputs
from harness.ranks import RankPool

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: The sums over ranks round the operands of later casts, so a few of them round to another float8 value.
ROUNDING = 1e-4


def _largest_error(name: str, recipe: Any, axes: dict[str, int], **options: Any) -> float:
    """The largest relative error of a gradient against torchao's conversion of the same layers on one process."""
    model = tiny_model(coverage_entries()[name]).float()
    reference = copy.deepcopy(model)
    inputs = tiny_inputs(model, batch=2, length=9)
    mesh = MeshSpec(**axes).build(device_type="cpu")
    parallelize(model, mesh, logits="full", steps=(Float8(recipe, emulate=True),), **options)
    layers = _layers(model)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(reference, config=config, module_filter_fn=lambda _, path: path in layers)
    for each in (reference, model):
        each(**inputs, use_cache=False).logits.square().mean().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    return max(_error(expected[name], parameter.grad) for name, parameter in model.named_parameters())


def _layers(model: nn.Module) -> set[str]:
    wrapped = describe_parallelism(model).wrapped
    return {path for path, effects in wrapped.items() if "multiplies in float8" in effects}


def _error(expected: torch.Tensor | None, gradient: torch.Tensor | None) -> float:
    if expected is None or gradient is None:
        return 0.0 if expected is gradient else torch.inf
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return ((full - expected).norm() / expected.norm().clamp(min=1e-9)).item()


@pytest.mark.parametrize("recipe", RECIPES)
def test_float8_on_one_process_equals_torchaos_conversion(recipe: str) -> None:
    assert _largest_error("qwen3", recipe, {}) == 0


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "phi3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_float8_over_tp_equals_one_process(two_ranks: RankPool, name: str, recipe: str) -> None:
    for sequence_parallel in (False, True):
        run = (_largest_error, name, recipe, {"tp": 2})
        assert max(two_ranks.run(*run, sequence_parallel=sequence_parallel)) < ROUNDING


def _error_without_agreement(name: str, recipe: str) -> float:
    agreeing = compat.Float8Recipe.cast
    compat.Float8Recipe.cast = lambda *args, sharded, **options: agreeing(*args, sharded=None, **options)  # type: ignore[method-assign]
    try:
        return _largest_error(name, recipe, {"tp": 2})
    finally:
        compat.Float8Recipe.cast = agreeing  # type: ignore[method-assign]


def test_float8_scales_of_one_rank_change_gradients(two_ranks: RankPool) -> None:
    assert min(two_ranks.run(_error_without_agreement, "qwen3", "tensorwise")) > 100 * ROUNDING


def test_float8_layers_compile_in_the_graph_of_their_block() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = Compile({"backend": backend, "fullgraph": True})
    assert _largest_error("qwen3", "tensorwise", {}, compile=compiled) == 0
    assert len(graphs) == 1


def test_float8_keeps_the_dtype_of_routers_adapters_and_small_layers() -> None:
    model = tiny_model(coverage_entries()["qwen3_next"])
    parallelize(model, MeshSpec().build(device_type="cpu"), steps=(Float8(emulate=True),))
    kept = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)} - _layers(model)
    assert {path.rpartition(".")[2] for path in kept} == {"lm_head", "shared_expert_gate"}


def test_float8_without_float8_units_names_the_emulation() -> None:
    with pytest.raises(BackendError, match=r"model is on cpu: .* Float8\('rowwise', emulate=True\)"):
        _parallelized(Float8("rowwise"))


def test_float8_of_unknown_recipes_or_old_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="recipe='blockwise': write one of 'tensorwise'"):
        Float8("blockwise")  # type: ignore[arg-type]
    monkeypatch.setattr(compat, "OLDEST", (99, 0))
    with pytest.raises(OptionError, match=r"needs torchao 99\.0 or later, and 0\."):
        _parallelized(Float8(emulate=True))


def test_float8_of_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="no linear layer in the blocks of Sequential can multiply in float8"):
        _parallelized(Float8(emulate=True), width=8)


def _parallelized(step: Float8, width: int = 16) -> nn.Module:
    model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(width, width))]))
    return parallelize(model, MeshSpec().build(device_type="cpu"), steps=(step,))
