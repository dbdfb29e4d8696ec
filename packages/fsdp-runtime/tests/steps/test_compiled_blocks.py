"""Compiled blocks under a plan: one graph, few frames of Python, the gradients of one process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.dry_run.trace.fake_world import fake_world
from fsdp_runtime.errors import OptionError
from fsdp_runtime.steps import Compile
from harness.compiler import forget_compiled, graph_breaks, graphs_compiled
from harness.layers import gradient_mismatches
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool
from tp_plans import ColwiseParallel, RowwiseParallel, SequenceParallel, Shard

AOT = Compile({"backend": "aot_eager"})
SP = {"sequence_parallel": True}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    forget_compiled()
    yield
    forget_compiled()


def _frames_of_a_step(model: Any, inputs: dict[str, Any]) -> int:
    """Return the calls of this project's functions in a forward and backward of compiled code."""
    frames = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal frames
        file = frame.f_code.co_filename
        frames += event == "call" and ("fsdp_runtime" in file or "tp_plans" in file)

    for step in range(2):
        sys.setprofile(profile if step else None)
        try:
            model(**inputs).logits.to_local().sum().backward()
        finally:
            sys.setprofile(None)
    return frames


@pytest.mark.parametrize(
    ("axes", "options", "most"),
    [
        ({"tp": 4}, {}, 140),
        pytest.param({"tp": 4}, {"sequence_parallel": True}, 180, marks=pytest.mark.slow),
        pytest.param({"tp": 4}, {**SP, "activation_checkpointing": "block"}, 180, marks=pytest.mark.slow),
        ({"tp": 4}, {**SP, "activation_checkpointing": "selective"}, 180),
        ({"dp_shard": 2, "tp": 4}, {**SP, "activation_checkpointing": "block"}, 220),
        ({"tp": 4}, {**SP, "packed_sequences": True}, 180),
    ],
    ids=["TP", "SP", "SP recomputed", "SP selective", "FSDP2 x SP", "packed SP"],
)
def test_compiled_blocks_have_one_graph_and_few_frames(
    axes: dict[str, int], options: dict[str, Any], most: int
) -> None:
    frames = []
    with fake_world(MeshSpec(**axes), rank=0) as mesh:
        for layers in (2, 3):
            forget_compiled()
            model = tiny_model(
                "LlamaForCausalLM", num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4
            )
            parallelize(model, mesh, compile=AOT, **options)
            inputs = tiny_inputs(model, batch=1, length=8)
            if "packed_sequences" in options:
                inputs = {"input_ids": inputs["input_ids"], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
            frames.append(_frames_of_a_step(model, inputs))
            assert (graphs_compiled(), graph_breaks()) == (1, {})
    assert frames[1] - frames[0] <= most


def _faults_at_lengths(architecture: str, mode: str) -> tuple[list[str], int, dict[str, int]]:
    """Mismatches with one process over steps of three lengths, the graphs, and the breaks."""
    forget_compiled()
    plain = tiny_model(architecture, num_hidden_layers=2)
    mesh = MeshSpec(tp=2).build(device_type="cpu")
    options = {"sequence_parallel": True, "activation_checkpointing": mode, "logits": "full"}
    model = parallelize(copy.deepcopy(plain), mesh, compile=AOT, **options)
    for length in (7, 8, 11):
        inputs = tiny_inputs(plain, batch=2, length=length)
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits, rtol=1e-5, atol=1e-6)
        for each in (plain, model):
            each(**inputs).logits.square().sum().backward()
    return list(gradient_mismatches(plain, model, bound=1e-4)), graphs_compiled(), dict(graph_breaks())


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [
        ("Qwen3ForCausalLM", "selective"),
        pytest.param("GPT2LMHeadModel", "none", marks=pytest.mark.slow),
        pytest.param("Qwen3MoeForCausalLM", "block", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_train_as_one_process_at_any_length(two_ranks: RankPool, architecture: str, mode: str) -> None:
    for mismatches, graphs, breaks in two_ranks.run(_faults_at_lengths, architecture, mode):
        assert (mismatches, breaks) == ([], {})
        assert graphs <= 10  # with and without gradients: lengths that ``tp`` divides or not, one length or any


@pytest.mark.parametrize(("lengths", "graphs"), [([(3, 6), (4, 5), (2, 3, 4)], 1), ([(4, 5), (9,), (5, 4)], 2)])
def test_compiled_blocks_isolate_the_documents_of_each_batch(lengths: list[tuple[int, ...]], graphs: int) -> None:
    plain = tiny_model("LlamaForCausalLM", num_hidden_layers=2)
    mesh = MeshSpec().build(device_type="cpu")
    model = parallelize(copy.deepcopy(plain), mesh, packed_sequences=True, compile=AOT)
    tokens = tiny_inputs(plain, batch=1, length=9)["input_ids"]
    for documents in lengths:
        positions = torch.cat([torch.arange(length) for length in documents])[None]
        model(input_ids=tokens, position_ids=positions).logits.square().sum().backward()
        for document in tokens.split(documents, dim=1):
            plain(input_ids=document, use_cache=False).logits.square().sum().backward()
    assert list(gradient_mismatches(plain, model, bound=1e-4)) == []
    assert (graphs_compiled(), graph_breaks()) == (graphs, {})  # a row of one document needs no mask


def _copied_after_backward() -> bool:
    """Copy a compiled model with gradients; its norms are summed by one collective."""
    torch.compiler.reset()
    model = tiny_model("Qwen3ForCausalLM", num_hidden_layers=1)
    model = parallelize(model, MeshSpec(tp=2).build(device_type="cpu"), compile=AOT)
    inputs = tiny_inputs(model, batch=2, length=7)
    model(**inputs).logits.sum().backward()
    copied = copy.deepcopy(model)
    gradients = zip(model.parameters(), copied.parameters(), strict=True)
    same = all(torch.equal(one.grad.full_tensor(), other.grad.full_tensor()) for one, other in gradients)
    return same and torch.equal(model(**inputs).logits.full_tensor(), copied(**inputs).logits.full_tensor())


def test_compiled_blocks_are_copied_with_their_gradients(two_ranks: RankPool) -> None:
    assert two_ranks.run(_copied_after_backward) == [True, True]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states.mul_(2)
        return hidden_states + self.down(self.up(self.norm(hidden_states)))


def test_compiled_blocks_that_write_into_their_input_raise() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.ModuleList([InPlace()]))
    plan: dict[str, Any] = {"1.0.norm": SequenceParallel(), "0": SequenceParallel(), "1.0.up": ColwiseParallel()}
    plan |= {"1.0.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    with fake_world(MeshSpec(tp=2), rank=0) as mesh:
        parallelize(model, mesh, plan=plan, compile=AOT)
        stream = model[0](torch.randn(1, 4, 8, requires_grad=True))
        with pytest.raises(RuntimeError, match="modified inplace"):
            model[1][0](stream)


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}])
def test_cuda_graphs_are_refused_where_ranks_share_a_model(options: dict[str, Any]) -> None:
    with (
        fake_world(MeshSpec(dp_shard=2), rank=0) as mesh,
        pytest.raises(OptionError, match="records CUDA graphs"),
    ):
        parallelize(tiny_model("LlamaForCausalLM"), mesh, compile=Compile(options))
