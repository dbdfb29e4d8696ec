"""Attention by kernels that know documents, on stand-ins: exact, with work and memory that follow the documents."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from coverage.packing import LENGTH, PACKED_BOUND, ROWS, measure_packing, measure_packing_on_ranks, packed_positions
from coverage.table import entries, tiny_model
from fsdp_runtime import MeshSpec, describe_parallelism, parallelize
from fsdp_runtime.dry_run.trace.fake_world import fake_tensors_without_data, fake_world
from fsdp_runtime.steps import Compile, ContextAttention
from fsdp_runtime.steps.attention.kernels import AttentionKernels, block_mask
from fsdp_runtime.steps.context.methods import Method
from fsdp_runtime.steps.documents.documents import Documents
from harness.attention_kernels import CALLS, accelerated
from harness.memory import LargestTensor
from harness.ranks import RankPool
from test_host_syncs import CountReads
from test_shared_prefixes import _on_ranks as trees_on_ranks
from test_shared_prefixes import _one_process as trees_in_one_process


def _packed(model: nn.Module, **options: Any) -> Any:
    return parallelize(model, MeshSpec().build(device_type="cpu"), packed_sequences=True, **options)


def _kernels_of(name: str, without: tuple[str, ...] = ()) -> set[str]:
    """The kernels of a model's layers, after a comparison of packed rows with their documents."""
    reports = []

    def packed(model: nn.Module) -> nn.Module:
        reports.append(describe_parallelism(_packed(model)))
        return model

    with accelerated(without=without):
        result = measure_packing(tiny_model(entries()[name]), packed)
    assert result.output_error <= PACKED_BOUND
    assert {name: error for name, error in result.gradient_errors.items() if not error <= PACKED_BOUND} == {}
    assert f"attention by {next(iter(reports[0].attention.values()))}: " in str(reports[0])
    return set(reports[0].attention.values())


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("afmoe", "varlen"),  # masks that are built without position ids
        ("gemma3_text", "varlen"),  # windows
        ("llama4_text", "varlen"),  # chunks
        ("qwen3_next", "varlen"),  # beside delta nets
        ("deepseek_v3", "varlen"),  # values narrower than queries
        ("vaultgemma", "flex"),  # soft caps
        ("granite_swa", "flex"),  # sinks
        ("doge", "mask"),  # masks from the values of all tokens
    ],
)
def test_packed_rows_equal_their_documents_by_each_kernel(name: str, kernel: str) -> None:
    assert _kernels_of(name) == {kernel}
    assert CALLS.varlen + CALLS.flex > 2 or kernel == "mask"


def test_failing_kernels_are_left_out_with_one_warning_each(caplog: pytest.LogCaptureFixture) -> None:
    assert _kernels_of("llama", without=("varlen",)) == {"batches"}
    assert _kernels_of("vaultgemma", without=("varlen", "flex")) == {"mask"}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    failed = [text for text in warnings if "no kernel image is available" in text]
    assert [text.split("'")[1] for text in failed] == ["varlen", "flex", "varlen"]
    held = [text for text in warnings if "1,152 bytes" in text or "9,216 bytes" in text]
    assert len(held) == 1


def _one_rank_fails(rank_of_failure: int) -> tuple[str, list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_runtime").addHandler(handler)
    mesh = MeshSpec(tp=2).build(device_type="cpu")
    with accelerated(without=("varlen",) if mesh.get_rank() == rank_of_failure else ()):
        model = parallelize(tiny_model(entries()["llama"]), mesh, packed_sequences=True)
    logging.getLogger("fsdp_runtime").removeHandler(handler)
    return describe_parallelism(model).attention["model.layers.0.self_attn"], messages


def test_ranks_agree_on_a_kernel_that_fails_on_one_of_them(two_ranks: RankPool) -> None:
    (first, warned), (second, _) = two_ranks.run(_one_rank_fails, 1)
    assert first == second == "batches"
    assert any("'varlen': on rank 1" in message for message in warned)


def _over_cp(cases: list[tuple[Method, str]]) -> dict[str, float]:
    errors = {}
    for method, name in cases:
        with accelerated():
            found = measure_packing_on_ranks(name, {"cp": 2}, context_parallel=method)
        assert CALLS.varlen + CALLS.flex > 2, (method, name)
        errors[f"{name}, {method}"] = max(found.values())
    return errors


@pytest.mark.parametrize(
    "cases",
    [
        [("allgather", "gemma3_text"), ("ulysses", "vaultgemma"), ("ring", "llama4_text"), ("ring", "deepseek_v3")],
        pytest.param(
            [("allgather", "vaultgemma"), ("allgather", "llama4_text"), ("ulysses", "gemma3_text"), ("ring", "qwen3")],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["some", "more"],
)
def test_packed_rows_over_cp_equal_their_documents_by_kernels(two_ranks: RankPool, cases: Any) -> None:
    for errors in two_ranks.run(_over_cp, cases):
        assert {case: error for case, error in errors.items() if not error <= PACKED_BOUND} == {}


def _trees_over_cp(name: str) -> dict[str, float]:
    with accelerated():
        errors = trees_on_ranks([(name, {"cp": 2}, {})])
    assert CALLS.flex > 2
    return errors


def test_prefix_trees_equal_separate_rows_by_flex_attention(two_ranks: RankPool) -> None:
    with accelerated():
        errors = trees_in_one_process(entries()["gemma3_text"])
    assert CALLS.flex > 2
    assert {case: error for case, error in errors.items() if not error <= PACKED_BOUND} == {}
    assert two_ranks.run(_trees_over_cp, "Qwen3ForCausalLM") == [{}, {}]


def _inputs(rows: Any = ROWS, **further: Any) -> dict[str, Any]:
    ids = torch.randint(3, 131, (len(rows), LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": packed_positions(rows), **further}


@pytest.mark.parametrize("rows", [ROWS, ((24,), (24,)), ((6, 6, 6, 6), (12, 12)), ((1,) * 24, (2,) * 12)])
def test_work_is_the_sum_of_squared_document_lengths(rows: tuple[tuple[int, ...], ...]) -> None:
    with accelerated():
        model = _packed(tiny_model(entries()["llama"]))
        CALLS.scores = 0
        model(**_inputs(rows))
    heads = model.config.num_attention_heads * model.config.num_hidden_layers
    of_rows = sum(length**2 for row in rows for length in row)
    assert CALLS.scores == (heads * of_rows if any(len(row) > 1 for row in rows) else 0)  # plain causal attention


def test_rows_with_given_boundaries_are_not_read() -> None:
    lengths = torch.tensor([0, *(length for row in ROWS for length in row)]).cumsum(0)
    with accelerated():
        model = _packed(tiny_model(entries()["llama"]))
        expected = model(**_inputs()).logits
        CALLS.scores, CALLS.bounds = 0, []
        with CountReads() as counted:
            logits = model(**_inputs(cu_seq_lens_q=lengths)).logits
    own = {file: count for file, count in counted.found.items() if file != "attention_kernels.py"}
    assert own == {}
    assert torch.equal(logits, expected)
    assert set(CALLS.bounds) == {(LENGTH, LENGTH)}


def test_compiled_blocks_stay_whole_and_few_over_changing_documents() -> None:
    torch._dynamo.reset()
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(len(inputs))
        return graph.forward

    batches = [ROWS, ((4, 8, 12), (13, 2, 9)), ((6, 6, 6, 6), (10, 14)), ((2,) * 12, (20, 4)), ((5, 6, 13), (20, 4))]
    with accelerated():
        plain = _packed(tiny_model(entries()["qwen3"]))
        compiled = _packed(tiny_model(entries()["qwen3"]), compile=Compile({"backend": count, "fullgraph": True}))
        for rows in batches:
            assert torch.allclose(compiled(**_inputs(rows)).logits, plain(**_inputs(rows)).logits, atol=1e-12)
    assert len(graphs) <= 3  # lengths are dynamic after the second batch, and the number of documents


def test_autocast_computes_a_float32_model_in_half_precision() -> None:
    with accelerated(), torch.autocast("cpu", dtype=torch.bfloat16):
        model = _packed(tiny_model(entries()["llama"]).float())
        calls = CALLS.varlen
        model(**_inputs()).logits.sum().backward()
    assert CALLS.varlen - calls == model.config.num_hidden_layers


_LONG, _RANKS = 131_072, 8


@pytest.mark.parametrize(("method", "window"), [("allgather", 4096), ("ulysses", 4096), ("ring", None)])
def test_long_rows_over_cp_hold_no_matrix_of_pairs(method: Method, window: int | None) -> None:
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    with fake_world(MeshSpec(cp=_RANKS), rank=1) as mesh, fake_tensors_without_data():
        kernels = AttentionKernels(accelerated=True, usable=frozenset({"varlen"}))
        attention = ContextAttention(mesh.get_group("cp"), "headtail", method, kernels=kernels)
        attention.begin(padding=None, documents=Documents(torch.ones(1, _LONG, dtype=torch.bool), (64, 8192)))
        shapes = [(1, heads, _LONG // _RANKS, 64) for heads in (8, 8, 8)]
        tensors = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        with LargestTensor() as largest:
            mask = attention.mask(
                q_length=_LONG // _RANKS, mask_function=function, attention_mask=None, device="cpu",
                dtype=torch.bfloat16, batch_size=1,
            )  # fmt: skip
            attention.attend(nn.Identity(), *tensors, attention_mask=mask)[0].sum().backward()
    assert largest.numel <= 2 * 8 * 64 * _LONG  # gathered keys and values


def test_a_block_mask_is_built_from_strips_of_rows() -> None:
    with fake_world(MeshSpec(cp=_RANKS), rank=1) as mesh, fake_tensors_without_data(), LargestTensor() as largest:
        kernels = AttentionKernels(accelerated=True)
        attention = ContextAttention(mesh.get_group("cp"), "headtail", kernels=kernels)
        mask: Any = attention.mask(
            q_length=_LONG // _RANKS, mask_function=sliding_window_causal_mask_function(4096), attention_mask=None,
            device="cpu", dtype=torch.bfloat16, batch_size=1,
        )  # fmt: skip
        block_mask(mask)
    assert largest.numel <= 1024 * _LONG


def test_operators_of_varlen_attention_have_the_arguments_that_are_passed() -> None:
    names = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "scale", "window_size"]
    forward, backward = (
        [argument.name for argument in operator._schema.arguments]
        for operator in (
            torch.ops.torch_attn._varlen_attn.default,
            torch.ops.torch_attn._varlen_attn_backward.default,
        )
    )
    assert varlen is not None
    assert forward[:10] == names
    further = ["is_causal", "rng_state", "scale", "window_size"]
    assert backward == ["grad_out", *names[:3], "out", "lse", *names[3:7], *further]
