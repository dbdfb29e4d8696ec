"""Blocks compiled in place: the same numbers, the same names."""

from __future__ import annotations

import copy
import inspect
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_runtime import MeshSpec, describe_parallelism, parallelize
from fsdp_runtime.steps import Compile
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool

AOT = {"backend": "aot_eager"}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.slow) for mode in ("none", "block")), "selective"]
)
def test_compiled_blocks_compute_the_same_gradients_under_the_same_names(mode: str) -> None:
    plain = tiny_model("Qwen3ForCausalLM", num_hidden_layers=1)
    model = copy.deepcopy(plain)
    parallelize(model, MeshSpec().build(device_type="cpu"), activation_checkpointing=mode, compile=Compile(AOT))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert describe_parallelism(model).compiled == ("model.layers.0",)
    inputs = tiny_inputs(plain, batch=2, length=7)
    for each in (plain, model):
        each(**inputs, use_cache=False).logits.sum().backward()
    for (name, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, msg=name)


def test_blocks_of_one_class_are_compiled_once() -> None:
    model = tiny_model("LlamaForCausalLM", num_hidden_layers=3)
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(len(graph.graph.nodes))
        return graph

    parallelize(model, MeshSpec().build(device_type="cpu"), compile=Compile({"backend": backend}))
    for _ in range(2):  # without use_cache=False: a cache has an entry for each layer, and a graph would be one layer's
        model(**tiny_inputs(model, batch=1, length=5))
        assert len(compiled) == 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raised: torch.Tensor = self.up(hidden_states)
        return raised.sin()


def test_more_graphs_than_torch_allows_by_default_are_compiled() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(len(graph.graph.nodes))
        return graph

    model = nn.Sequential(nn.ModuleList([Block()]))
    parallelize(model, MeshSpec().build(device_type="cpu"), compile=Compile({"backend": backend, "dynamic": False}))
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in (2, 3, 4):
            model.get_submodule("0.0")(torch.ones(length, 4))
    raised = "recompile_limit" in inspect.signature(torch.compile).parameters
    assert len(graphs) == (3 if raised else 1)


def test_compile_recomputes_packed_rows_selectively_where_python_runs_them() -> None:
    plain = tiny_model("LlamaForCausalLM")
    options = {"plan": None, "packed_sequences": True, "activation_checkpointing": "selective"}
    mesh = MeshSpec().build(device_type="cpu")
    compiled = parallelize(copy.deepcopy(plain), mesh, compile=Compile({"backend": "eager"}), **options)
    tokens = torch.arange(3, 12).view(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    compiled(input_ids=tokens, position_ids=positions).logits.square().sum().backward()
    for part in (slice(0, 4), slice(4, 9)):
        plain(input_ids=tokens[:, part], use_cache=False).logits.square().sum().backward()
    for (name, wanted), found in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("output", ["router_logits", "hidden_states"])
def test_outputs_that_are_recorded_are_there_after_a_forward_without_them(output: str) -> None:
    plain = tiny_model("Qwen3MoeForCausalLM")
    model = parallelize(copy.deepcopy(plain), MeshSpec().build(device_type="cpu"), compile=Compile(AOT))
    inputs = tiny_inputs(plain, batch=2, length=7)
    for _ in range(2):
        model(**inputs)
        found = model(**inputs, **{f"output_{output}": True})
        assert len(found[output]) == len(plain(**inputs, **{f"output_{output}": True})[output])
        assert describe_parallelism(model).compiled


def _gradients_with_dropout(backend: str | None, mode: str) -> list[torch.Tensor]:
    """Gradients of a model that drops activations and attention weights; backward draws from another state."""
    torch.compiler.reset()
    model = tiny_model("LlamaForCausalLM", num_hidden_layers=1, attention_dropout=0.3).train()
    model.model.layers[0].mlp.down_proj = nn.Sequential(model.model.layers[0].mlp.down_proj, nn.Dropout(0.3))
    options = {} if backend is None else {"compile": Compile({"backend": backend})}
    parallelize(model, MeshSpec().build(device_type="cpu"), activation_checkpointing=mode, **options)
    torch.manual_seed(5)
    loss = model(**tiny_inputs(model, batch=2, length=7)).logits.square().sum()
    torch.manual_seed(6)
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["mlp", "block", "selective"])
def test_compiled_recomputations_draw_the_dropout_of_their_forward(backend: str, mode: str) -> None:
    expected = _gradients_with_dropout(None, "none")
    torch.testing.assert_close(_gradients_with_dropout(backend, mode), expected)


def _packed_rows_over_tp() -> float:
    """The largest error of logits of documents in compiled blocks."""
    torch.compiler.reset()
    plain = tiny_model("LlamaForCausalLM", num_hidden_layers=1)
    mesh = MeshSpec(tp=2).build(device_type="cpu")
    model = parallelize(
        copy.deepcopy(plain), mesh, packed_sequences=True, logits="full", compile=Compile({"backend": "eager"})
    )
    tokens = tiny_inputs(plain, batch=1, length=9)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    found = model(input_ids=tokens, position_ids=positions).logits
    expected = [plain(input_ids=part, use_cache=False).logits for part in tokens.split([4, 5], dim=1)]
    return (found - torch.cat(expected, dim=1)).abs().max().item()


def test_packed_rows_are_compiled_with_layers_over_tp(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(_packed_rows_over_tp)) < 1e-5


def _compiled_from_disk(folder: str) -> list[str]:
    """Run rows that ``tp`` does not divide in fresh code, then in what the first run has stored; return the tags."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    mesh = MeshSpec(tp=2).build(device_type="cpu")
    for _ in range(2):
        torch.compiler.reset()
        model = tiny_model("Qwen3ForCausalLM", num_hidden_layers=1).float()
        model = parallelize(model, mesh, packed_sequences=True, sequence_parallel=True, compile=True)
        tokens = tiny_inputs(model, batch=1, length=7)["input_ids"]
        model(input_ids=tokens, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]])).logits.mean().backward()
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    return re.findall(r"tp rank \d+", torch.compiler.config.cache_key_tag)


@pytest.mark.slow
def test_code_on_disk_is_that_of_the_rank_where_parts_of_a_sequence_differ(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(_compiled_from_disk, str(tmp_path)) == [["tp rank 0"], ["tp rank 1"]]
